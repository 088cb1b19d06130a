"""Death and standstill at every labelled point of the protocol: the survivor notices, the next session is clean."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from twinplane.shared import segment
from twinplane.shared._shm import POINTS, ControlEnd, DataEnd
from twinplane.shared.liveness import Liveness, PeerWatch, process_start_time
from twinplane.shared.wire import Capacities, Phase

Spawn = Callable[..., Any]  # conftest.PeerProcess
PEER_GONE = 3  # peer.py's exit status

# At a point's first passage, and (slow) in full swing; `ready` is stored by the creator, once.
CASES = [pytest.param("control", "before-ready-H1", 1)] + [
    pytest.param(role, point, passage, marks=[] if passage == 1 else [pytest.mark.slow])
    for role in ("control", "data")
    for point in POINTS
    for passage in (1, 7, 50)
    if point != "before-ready-H1" and (role == "control" or not point.endswith("interrupt-I1"))
]


@pytest.mark.parametrize(("victim", "point", "passage"), CASES)
def test_C15_death_at_any_point_leaves_a_survivor_that_knows_and_a_clean_next_session(
    spawn: Spawn, instance: str, victim: str, point: str, passage: int
) -> None:
    trap = ("--signal-at", point, passage, int(signal.SIGKILL))
    # The data plane first: it waits long for a session, but a session only --timeout-ns for its answers.
    # Pauses on both sides, so that each sleeps sometimes and is rung awake.
    peers = {}
    for role in ("data", "control"):
        options = trap if role == victim else ()
        peers[role] = spawn(role, instance, 1, "--count", 10**9, "--pattern", "random", "--timeout-ns", 300_000_000, *options)
        peers[role].wait_started()
    assert peers.pop(victim).wait_exit() == -signal.SIGKILL
    (survivor,) = peers.values()
    if point == "before-ready-H1":
        survivor.kill()  # it waits for a session that never came to be
    else:
        assert survivor.wait_exit() == PEER_GONE
    fresh = [spawn(role, instance, 2).wait_started() for role in ("data", "control")]
    assert [peer.wait_attached().wait_exit() for peer in fresh] == [0, 0]


def test_a_step_half_written_by_the_dead_is_never_read(spawn: Spawn, instance: str) -> None:
    """Killed with its slot filled but not published: the reader sees neither that slot nor a word of it later."""
    control = spawn("control", instance, 1, "--signal-at", "before-publish-P1", 3, int(signal.SIGKILL), "--in-flight", 4)
    assert control.wait_exit() == -signal.SIGKILL
    data = DataEnd(segment.open_segment(segment.instance_names(instance).segment), 1)
    assert [data.wait_step(0) for _ in range(3)] == [0, 1, None]
    with segment.InstanceLock(instance):
        made = segment.create_segment(instance, data.capacities, epoch=2)
        end = ControlEnd(made.fd, 2)
        slots = []
        for _ in range(4):
            slot = end.step_slot(0)
            assert slot is not None
            slots.append(slot.copy())
            end.publish()
        assert not np.concatenate(slots).any()
        made.close()


def test_a_stopped_data_plane_that_wakes_up_late_can_not_disturb_its_successor(spawn: Spawn, instance: str, capacities: Capacities) -> None:
    with segment.InstanceLock(instance):
        first = segment.create_segment(instance, capacities, epoch=1)
        old = ControlEnd(first.fd, 1)
        # Stops with its answer written, right before publishing it.
        zombie = spawn("data", instance, 1, "--signal-at", "before-publish-P1", 1, int(signal.SIGSTOP)).wait_attached()
        slot = old.step_slot(0)
        assert slot is not None
        slot[:] = 0  # what peer.py expects in step 0
        old.publish()
        os.waitpid(zombie.pid, os.WUNTRACED)

        second = segment.create_segment(instance, capacities, epoch=2)
        control, data = ControlEnd(second.fd, 2), DataEnd(second.fd, 2)
        os.kill(zombie.pid, signal.SIGCONT)
        assert old.wait_result(20_000_000_000) == 0  # it went on, into the old pages
        assert control.wait_result(50_000_000) is None
        assert control.peer()["published"] == control.peer()["heartbeat_ns"] == 0
        slot = control.step_slot(0)
        assert slot is not None
        slot[:] = 5
        control.publish()
        assert data.wait_step(0) == 0 and (data.step(0) == 5).all()
        zombie.kill()
        first.close()
        second.close()


def test_a_reader_that_stands_still_holds_the_writer_back_and_loses_nothing(spawn: Spawn, instance: str) -> None:
    control, data = (
        spawn(role, instance, 1, "--count", 20_000, "--in-flight", 4, "--timeout-ns", 20_000_000_000).wait_attached()
        for role in ("control", "data")
    )
    for _ in range(5):
        os.kill(data.pid, signal.SIGSTOP)
        time.sleep(0.06)
        os.kill(data.pid, signal.SIGCONT)
        time.sleep(0.02)
    reports = [peer.read() for peer in (control, data)]  # each has verified order and content of all it received
    assert [report["steps"] for report in reports] == [20_000, 20_000]
    assert [report["missed_wakes"] for report in reports] == [0, 0]


# --------------------------------------------------------------------- the heartbeat path, without lifeline


def start_data_plane(spawn: Spawn, instance: str, capacities: Capacities) -> tuple[ControlEnd, Any, PeerWatch]:
    made = segment.create_segment(instance, capacities, epoch=1)
    control = ControlEnd(made.fd, 1)
    made.close()
    data = spawn("data", instance, 1, "--timeout-ns", 10**12).wait_attached()
    return control, data, PeerWatch("data plane", data.pid, lambda: (control.peer(), control.own()))


def seconds_until(watch: PeerWatch, verdict: Liveness) -> float:
    start = time.monotonic()
    while watch.check() is not verdict:
        assert time.monotonic() - start < 20, watch.report()
        time.sleep(0.01)
    return time.monotonic() - start


def test_death_is_seen_by_the_heartbeat_alone_within_100_ms(spawn: Spawn, instance: str, capacities: Capacities) -> None:
    delays = []
    for _ in range(4):
        _, data, watch = start_data_plane(spawn, instance, capacities)
        assert watch.check() is Liveness.ALIVE
        os.kill(data.pid, signal.SIGKILL)
        delays.append(seconds_until(watch, Liveness.DEAD))  # its zombie still has a pid: that must not count as life
    assert min(delays) < 0.1, delays  # the best of four: the machine may be busy


def test_a_stopped_plane_is_stalled_and_not_dead_and_recovers(spawn: Spawn, instance: str, capacities: Capacities) -> None:
    _, data, watch = start_data_plane(spawn, instance, capacities)
    os.kill(data.pid, signal.SIGSTOP)
    seconds_until(watch, Liveness.STALLED)
    os.kill(data.pid, signal.SIGCONT)
    seconds_until(watch, Liveness.ALIVE)


def test_a_peer_in_another_pid_namespace_is_never_called_dead_by_its_heartbeat(spawn: Spawn, instance: str, capacities: Capacities) -> None:
    control, data, _ = start_data_plane(spawn, instance, capacities)
    watch = PeerWatch("data plane", 0, lambda: (control.peer(), control.own()))
    os.kill(data.pid, signal.SIGKILL)
    seconds_until(watch, Liveness.STALLED)
    assert "another PID namespace" in watch.report()


def test_a_pid_that_was_given_to_another_process_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    page = {"heartbeat_ns": 0, "phase": 0, "phase_step": 0, "phase_since_ns": 0, "published": 0, "consumed": 0}
    watch = PeerWatch("data plane", os.getpid(), lambda: (page, page))
    monkeypatch.setattr("twinplane.shared.liveness.process_start_time", lambda _: process_start_time(os.getpid()) + 1)
    seconds_until(watch, Liveness.DEAD)


def test_a_peer_that_has_just_attached_is_given_time_for_its_first_beat() -> None:
    page = {"heartbeat_ns": 0, "phase": 0, "phase_step": 0, "phase_since_ns": 0, "published": 0, "consumed": 0}
    assert PeerWatch("data plane", os.getpid(), lambda: (page, page)).check() is Liveness.ALIVE


def test_INV_4_stall_report_names_peer_phase_step_times_and_counters() -> None:
    now = time.monotonic_ns()
    peer = {
        "heartbeat_ns": now - 700_000_000,
        "phase": Phase.FORWARD,
        "phase_step": 17,
        "phase_since_ns": now - 2_000_000_000,
        "published": 17,
        "consumed": 16,
    }
    own = {"published": 19, "consumed": 17}
    watch = PeerWatch("data plane", os.getpid(), lambda: (peer, own))
    watch._since_ns = 0  # attached long ago
    report = watch.report()
    assert f"the data plane (pid {os.getpid()}) is in phase FORWARD of step 17 for 20" in report
    assert "last heartbeat 70" in report
    assert "it published 17 and consumed 16 slots, we published 19 and consumed 17" in report
    peer["phase"] = 99  # from a newer peer
    assert "phase 99" in watch.report()


def test_start_time_of_a_process_tells_it_from_others() -> None:
    assert process_start_time(os.getpid()) > 0
    assert process_start_time(2**22 + 1) == 0  # above the largest pid
