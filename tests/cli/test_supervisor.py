"""The supervisor, over tiny fake planes: what it restarts, what it gives up on, how it stops, what it leaves behind."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import is_alive, wait_until


def test_sigterm_stops_the_control_plane_first_and_then_the_data_plane(supervise):
    run = supervise()
    run.wait_up()
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 0
    (_, control_end), (_, data_end) = run.notes("control", "end")[0], run.notes("data", "end")[0]
    assert control_end < data_end
    assert len(run.notes("control", "term")) == 1


def test_C09_a_draining_control_plane_gets_its_time_and_keeps_its_data_plane(supervise):
    run = supervise(control="drain=0.7")
    run.wait_up()
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 0
    (_, asked), (_, drained) = run.notes("control", "term")[0], run.notes("control", "end")[0]
    assert drained - asked >= 0.7
    assert run.notes("data", "term")[0][1] > drained


def test_C09_a_second_signal_stops_at_once(supervise):
    run = supervise(control="drain=60")
    run.wait_up()
    run.process.send_signal(signal.SIGINT)
    run.wait_for("control", "term")
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 0
    assert run.notes("control", "end") == []
    assert not any(map(is_alive, run.pids()))


def test_C09_a_plane_that_ignores_sigterm_is_killed_when_the_drain_time_is_over(supervise):
    run = supervise(control="stubborn", drain_s=0.1)
    run.wait_up()
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 1
    assert "did not stop in time" in run.last_line
    assert not any(map(is_alive, run.pids()))


def test_C09_sigterm_while_loading_ends_both_without_waiting_for_a_drain(supervise):
    run = supervise(control="load", data="load", drain_s=60)
    run.wait_up()
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 0


def test_C05_a_data_plane_killed_in_service_is_started_again_beside_the_same_control_plane(supervise):
    run = supervise()
    control, data = run.wait_up()
    run.kill("data")
    (_, _), (new_data, _) = run.wait_for("data", "up", 2)
    assert new_data != data and is_alive(control)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 0
    assert len(run.notes("control", "start")) == 1
    assert f"restarting: the data plane (pid {data}) was killed by SIGKILL: probably because memory ran out" in run.stderr


def test_a_control_plane_killed_in_service_is_started_again_beside_the_same_data_plane(supervise):
    run = supervise()
    _, data = run.wait_up()
    run.kill("control")
    run.wait_for("control", "up", 2)
    assert is_alive(data)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 0
    assert len(run.notes("data", "start")) == 1


def test_a_crash_loop_ends_after_the_allowed_restarts_with_growing_pauses(supervise):
    run = supervise(data="load,die=SIGSEGV", max_restarts=3)
    run.wait_up()
    run.kill("data", signal.SIGSEGV)
    assert run.finish() == 1
    starts = [when for _, when in run.notes("data", "start")]
    assert len(starts) == 1 + 3
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts[1:])]
    assert pauses[0] >= 0.5 and pauses[1] >= 1.0
    assert "SIGSEGV" in run.last_line and "3 restarts" in run.last_line and "--max-restarts" in run.last_line
    assert not any(map(is_alive, run.pids()))


def test_F03_a_failing_start_gives_up_at_once_and_ends_with_one_sentence_that_names_the_cause(supervise):
    run = supervise(control="load", data="fail=FileNotFoundError: shard 2 of 3 is missing")
    assert run.finish() == 1
    pid = run.notes("data", "start")[0][0]
    assert run.last_line == f"failed: the data plane (pid {pid}) ended with exit code 1: FileNotFoundError: shard 2 of 3 is missing"
    assert len(run.notes("data", "start")) == 1


@pytest.mark.parametrize("name", ["SIGKILL", "SIGBUS", "SIGSEGV"])
def test_F03_a_signal_during_the_start_is_named_with_its_likely_reason(supervise, name):
    run = supervise(control="load", data=f"die={name}")
    assert run.finish() == 1
    assert f"was killed by {name}: " in run.last_line and str(run.notes("data", "start")[0][0]) in run.last_line


@pytest.mark.parametrize("code", [2, 78])
def test_a_configuration_error_is_never_retried(supervise, code):
    run = supervise(control=f"serve,exit={code}")
    run.wait_up()
    wait_until(lambda: run.notes("control", "up"), "served")
    run.kill("control")
    assert run.finish() == 78
    assert len(run.notes("control", "start")) == 2


def test_a_control_plane_stopped_from_outside_stops_everything_cleanly(supervise):
    run = supervise()
    run.wait_up()
    run.kill("control", signal.SIGTERM)
    assert run.finish() == 0
    assert not any(map(is_alive, run.pids()))


@pytest.mark.parametrize("control", ["serve", "load"])
def test_C06_killing_the_supervisor_leaves_no_plane(supervise, control):
    run = supervise(control=control)
    pids = run.wait_up()
    run.process.kill()
    run.process.wait()
    wait_until(lambda: not any(map(is_alive, pids)), "planes gone")


def test_C06_a_plane_started_by_a_dead_parent_ends_at_once():
    # The parent dies between fork and the prctl call: the child must notice by itself.
    code = "import os; from twinplane.shared.supervision import die_with_parent; die_with_parent(os.getppid() + 1); print('still here')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.returncode == 1 and child.stdout == ""


def test_C18_planes_inherit_nothing_but_their_report_pipe(supervise):
    with Path(os.devnull).open() as leak:
        os.set_inheritable(leak.fileno(), True)
        run = supervise()
        control, data = run.wait_up()
    for pid in (control, data):
        extra = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if int(fd.name) > 2]
        assert len(extra) == 1 and extra[0].startswith("pipe:")


def test_each_plane_leads_its_own_process_group_so_that_ctrl_c_reaches_only_the_supervisor(supervise):
    run = supervise()
    control, data = run.wait_up()
    assert os.getpgid(control) == control and os.getpgid(data) == data


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_the_terminal_stops_the_server_unless_nohup_says_otherwise(supervise, ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)  # a child inherits it
    try:
        run = supervise()
    finally:
        signal.signal(signal.SIGHUP, before)
    run.wait_up()
    run.process.send_signal(signal.SIGHUP)
    if ignored:
        run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 0
    assert ("SIGTERM" if ignored else "SIGHUP") in run.stderr


def test_readiness_is_announced_once(supervise):
    run = supervise(control="serve,serve")
    run.wait_up()
    run.kill("control")
    run.wait_for("control", "up", 2)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 0
    assert run.stderr.count("ready: ready after") == 1 and "model on address" in run.stderr


def test_C11_the_idle_supervisor_sleeps(supervise):
    run = supervise()
    run.wait_up()
    time.sleep(0.2)

    def switches() -> int:
        status = Path(f"/proc/{run.process.pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in status if "voluntary_ctxt_switches" in line)

    before = switches()
    time.sleep(1.0)
    assert switches() - before <= 3
