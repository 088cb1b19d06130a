"""Rings and bells: order, back-pressure, lifetimes, and no lost wake-up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twinplane.shared import segment
from twinplane.shared._shm import WAIT_BOUND_NS, ControlEnd, DataEnd, ProtocolError
from twinplane.shared.wire import Capacities, Phase

Ends = tuple[ControlEnd, DataEnd]
LONG_NS = 20_000_000_000  # a wait nobody should sit out
Spawn = Callable[..., Any]  # conftest.PeerProcess


def send(control: ControlEnd, value: int) -> None:
    slot = control.step_slot(0)
    assert slot is not None
    slot[:] = value
    control.publish()


# ------------------------------------------------------------------------------------------------ semantics


def test_a_step_arrives_in_place_and_its_answer_comes_back(ends: Ends) -> None:
    control, data = ends
    send(control, 7)
    sequence = data.wait_step(0)
    assert sequence == 0
    assert (data.step(sequence) == 7).all()
    answer = data.result_slot(0)
    assert answer is not None
    answer[:3] = (1, 2, 3)
    data.publish()
    data.consume(sequence)
    assert control.wait_result(0) == 0
    assert control.result(0)[:3].tolist() == [1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["publish", "take", "consume"]), max_size=200))
def test_ring_behaves_like_a_bounded_queue(operations: list[str]) -> None:
    sizes = Capacities(3, 1, 1, 1, 0, 0, 1, 0, 0)
    name = f"test-{os.getpid()}-model"
    made = segment.create_segment(name, sizes, epoch=1)
    control, data = ControlEnd(made.fd, 1), DataEnd(made.fd, 1)
    made.close()
    waiting: deque[int] = deque()
    taken: deque[int] = deque()
    published = 0
    for operation in operations:
        if operation == "publish":
            slot = control.step_slot(0)
            assert (slot is None) == (len(waiting) + len(taken) == 3)
            if slot is not None:
                slot.view(np.uint64)[0] = published
                control.publish()
                waiting.append(published)
                published += 1
        elif operation == "take":
            sequence = data.wait_step(0)
            assert sequence == (waiting[0] if waiting else None)
            if sequence is not None:
                assert data.step(sequence).view(np.uint64)[0] == sequence
                taken.append(waiting.popleft())
        elif taken:
            data.consume(taken.popleft())
        assert [int(data.step(s).view(np.uint64)[0]) for s in taken] == list(taken)
    control.close()
    data.close()
    segment.instance_names(name).segment_path.unlink()


def test_C14_full_ring_holds_the_writer_back_and_nothing_is_overwritten(ends: Ends) -> None:
    control, data = ends
    for value in range(4):
        send(control, value)
    assert control.step_slot(WAIT_BOUND_NS) is None
    with pytest.raises(RuntimeError, match="without a free slot"):
        control.publish()
    for value in range(4):
        sequence = data.wait_step(0)
        assert sequence == value and (data.step(sequence) == value).all()
    assert control.step_slot(0) is None  # read, but not given back: still the reader's
    data.consume(1)  # gives back 0 and 1
    send(control, 4)
    send(control, 5)
    assert control.step_slot(0) is None
    assert (data.step(2) == 2).all() and (data.step(3) == 3).all()


def test_a_slot_given_back_can_not_be_read_by_number(ends: Ends) -> None:
    control, data = ends
    send(control, 1)
    with pytest.raises(IndexError, match="slot 0: open are the slots from 0 up to, not including, 0"):
        data.step(0)  # published, but not taken
    assert data.wait_step(0) == 0
    data.consume(0)
    with pytest.raises(IndexError):
        data.step(0)
    with pytest.raises(IndexError):
        data.consume(0)
    with pytest.raises(IndexError):
        data.consume(1)


def test_incoming_slots_are_read_only_and_outgoing_ones_are_not(ends: Ends) -> None:
    control, data = ends
    send(control, 1)
    assert data.wait_step(0) == 0
    with pytest.raises(ValueError, match="read-only"):
        data.step(0)[0] = 1
    slot = data.result_slot(0)
    assert slot is not None and slot.flags.writeable and slot.flags.c_contiguous
    again = data.result_slot(0)
    assert again is not None and np.shares_memory(slot, again)  # the mapping itself, no copy


def test_phase_and_heartbeat_are_seen_by_the_peer(ends: Ends) -> None:
    control, data = ends
    assert control.peer()["heartbeat_ns"] == 0
    data.set_phase(Phase.FORWARD, 41)
    data.beat()
    seen = control.peer()
    assert (seen["phase"], seen["phase_step"]) == (Phase.FORWARD, 41)
    assert 0 < seen["phase_since_ns"] <= seen["heartbeat_ns"] <= time.monotonic_ns()
    assert seen == data.own()
    data.start_heartbeat()
    wait_until(lambda: control.peer()["heartbeat_ns"] > seen["heartbeat_ns"])


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.002)


# ----------------------------------------------------------------------------------------------- the header


def test_another_sessions_segment_is_refused(instance: str, capacities: Capacities) -> None:
    made = segment.create_segment(instance, capacities, epoch=3)
    with pytest.raises(ProtocolError, match=r"epoch is 0x3, expected 0x4"):
        DataEnd(made.fd, 4)
    made.close()


@pytest.mark.parametrize(
    ("offset", "what"), [(0, "magic"), (8, "layout hash"), (20, "header size"), (24, "size"), (32, "epoch"), (92, "ready word")]
)
def test_a_header_that_is_wrong_anywhere_is_refused_by_name(instance: str, capacities: Capacities, offset: int, what: str) -> None:
    made = segment.create_segment(instance, capacities, epoch=1)
    os.pwrite(made.fd, b"\x7f", offset)
    for end in (DataEnd, ControlEnd):
        with pytest.raises(ProtocolError, match=f"the segment's {what} is 0x.*, expected 0x"):
            end(made.fd, 1)
    made.close()


def test_a_truncated_segment_is_an_error_and_not_a_bus_error(instance: str, capacities: Capacities) -> None:
    made = segment.create_segment(instance, capacities, epoch=1)
    os.truncate(made.fd, 8192)
    with pytest.raises(ProtocolError, match="8192 bytes, its header says"):
        DataEnd(made.fd, 1)
    os.truncate(made.fd, 0)
    with pytest.raises(ProtocolError, match="less than one page"):
        DataEnd(made.fd, 1)
    made.close()


def test_a_descriptor_that_is_no_file_is_an_os_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        DataEnd(1 << 20, 1)


def test_INV_2_writing_into_the_peers_page_is_impossible(instance: str, capacities: Capacities) -> None:
    """INV-2 by hardware: the peer's pages are mapped read-only."""
    made = segment.create_segment(instance, capacities, epoch=1)
    control, data = ControlEnd(made.fd, 1), DataEnd(made.fd, 1)
    inode = str(os.fstat(made.fd).st_ino)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    rights = [fields[1] for fields in maps if fields[4] == inode]
    made.close()
    # control: header | control | data | bells and steps | results.   data: header and control | the rest
    assert rights.count("r--s") == 4 and rights.count("rw-s") == 3
    control.close()
    data.close()


# -------------------------------------------------------------------------------------------------- waiting


def test_wake_ends_a_wait_from_another_thread_once(ends: Ends) -> None:
    _, data = ends
    threading.Timer(0.05, data.wake).start()
    assert data.wait_step(LONG_NS) is None
    start = time.monotonic()
    assert data.wait_step(30_000_000) is None
    assert time.monotonic() - start >= 0.03  # the wake has been used up


def test_wake_before_the_wait_is_not_lost_and_goes_before_news(ends: Ends) -> None:
    control, data = ends
    data.wake()
    send(control, 1)
    assert data.wait_step(LONG_NS) is None
    assert data.wait_step(LONG_NS) == 0


def test_wake_ends_the_wait_for_a_free_slot_and_still_reaches_wait_step(ends: Ends) -> None:
    _, data = ends
    for _ in range(4):
        assert data.result_slot(0) is not None
        data.publish()
    threading.Timer(0.05, data.wake).start()
    assert data.result_slot(LONG_NS) is None
    assert data.wait_step(LONG_NS) is None


def test_close_ends_a_wait_of_another_thread(ends: Ends) -> None:
    _, data = ends
    threading.Timer(0.05, data.close).start()
    assert data.wait_step(LONG_NS) is None
    with pytest.raises(ValueError, match="closed"):
        data.wait_step(0)


def test_two_threads_may_not_wait_on_one_end(ends: Ends) -> None:
    _, data = ends
    waiter = threading.Thread(target=data.wait_step, args=(LONG_NS,))
    waiter.start()

    def refused() -> bool:
        try:
            data.wait_step(1)
        except RuntimeError as error:
            return "two threads" in str(error)
        return False

    wait_until(refused)
    data.wake()
    waiter.join()


def test_other_python_threads_run_while_one_waits(ends: Ends) -> None:
    """The GIL is released: otherwise the timer thread that sends the step could not run."""
    control, data = ends
    threading.Timer(0.02, send, (control, 1)).start()
    assert data.wait_step(LONG_NS) == 0


def test_arrays_stay_valid_after_close_and_every_call_is_refused(ends: Ends) -> None:
    control, data = ends
    send(control, 9)
    assert data.wait_step(0) == 0
    view = data.step(0)
    slot = data.result_slot(0)
    assert slot is not None
    data.start_heartbeat()
    data.close()
    data.close()
    assert (view == 9).all()
    slot[:] = 1
    data.wake()  # from a watcher that comes late
    calls: list[Callable[[], object]] = [
        lambda: data.step(0),
        lambda: data.wait_step(0),
        lambda: data.result_slot(0),
        lambda: data.consume(0),
        lambda: data.set_phase(0, 0),
        data.publish,
        data.beat,
        data.start_heartbeat,
        data.peer,
        data.own,
        lambda: data.missed_wakes,
        lambda: data.capacities,
    ]
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()


WAIT_FOREVER = """
import signal
import sys
from twinplane.shared import segment
from twinplane.shared._shm import DataEnd
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
end = DataEnd(segment.open_segment(sys.argv[1]), 1)
print("waiting", flush=True)
try:
    end.wait_step(10**12)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_waiting_process_obeys_control_c(instance: str, capacities: Capacities) -> None:
    made = segment.create_segment(instance, capacities, epoch=1)
    made.close()
    process = subprocess.Popen([sys.executable, "-c", WAIT_FOREVER, made.name], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    time.sleep(0.05)  # into the sleep
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[0] == "interrupted\n" and process.returncode == 0


# -------------------------------------------------------------------------------- C13: no wake-up is lost

# With a bound of 30 s a lost wake-up is a wait of 30 s, which ends a peer with PEER_GONE after its time-out of 10 s. In lockstep
# (one message in flight) no later ring can hide it.
STRESS = ("--bound-ns", 30_000_000_000, "--timeout-ns", 10_000_000_000)


def exchange(spawn: Spawn, instance: str, *options: object) -> list[Any]:
    return [spawn(role, instance, 1, *options).wait_attached() for role in ("control", "data")]


def finish(peers: list[Any], count: int) -> list[dict[str, int]]:
    reports = [peer.read() for peer in peers]
    assert [peer.wait_exit() for peer in peers] == [0, 0]
    for report in reports:
        assert report["missed_wakes"] == 0 and report["steps"] == count
    return reports


@pytest.mark.parametrize("in_flight", [1, 4])
def test_C13_a_hundred_thousand_messages_each_way_with_random_pauses(spawn: Spawn, instance: str, in_flight: int) -> None:
    options = ("--count", 100_000, "--pattern", "random", "--in-flight", in_flight, *STRESS)
    finish(exchange(spawn, instance, *options), 100_000)


def test_C13_bursts_and_idle_gaps_around_the_bound(spawn: Spawn, instance: str) -> None:
    finish(exchange(spawn, instance, "--count", 20_000, "--pattern", "burst", "--timeout-ns", 10_000_000_000), 20_000)


def test_C13_both_planes_on_one_cpu(spawn: Spawn, instance: str) -> None:
    cpu = min(os.sched_getaffinity(0))
    finish(exchange(spawn, instance, "--count", 30_000, "--cpu", cpu, "--pattern", "random", *STRESS), 30_000)


def test_INV_1_C13_a_storm_of_signals_neither_wakes_nor_breaks_anything(spawn: Spawn, instance: str) -> None:
    peers = exchange(spawn, instance, "--count", 20_000, "--pattern", "random", *STRESS)
    over = threading.Event()

    def storm() -> None:
        while not over.wait(0.0005):
            for peer in peers:
                if peer.process.poll() is None:
                    peer.process.send_signal(signal.SIGUSR1)

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        reports = finish(peers, 20_000)
    finally:
        over.set()
        thread.join()
    assert all(report["signals"] > 50 for report in reports)


@pytest.mark.slow
def test_C13_a_million_messages_each_way(spawn: Spawn, instance: str) -> None:
    finish(exchange(spawn, instance, "--count", 1_000_000, "--pattern", "random", "--in-flight", 1, *STRESS), 1_000_000)


def test_C11_waiting_costs_almost_no_cpu(ends: Ends) -> None:
    control, data = ends
    data.start_heartbeat()
    start, cpu = time.monotonic(), time.process_time()
    assert data.wait_step(1_500_000_000) is None
    assert (time.process_time() - cpu) / (time.monotonic() - start) < 0.03
    assert control.peer()["heartbeat_ns"] > 0 and data.missed_wakes == 0
