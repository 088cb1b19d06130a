"""The kernels' thread pool: dynamic sharing, resizing, several callers, oversubscription."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from twinplane.kernels import _cpu


def test_every_tile_runs_exactly_once(restored_threads: None) -> None:
    for threads in (1, 2, 3, 7):
        _cpu.set_threads(threads)
        for tiles in (0, 1, 2, 5, 1000):
            assert sum(_cpu.claimed_tiles(tiles, [0] * threads)) == tiles


def test_a_slowed_worker_takes_fewer_tiles(restored_threads: None) -> None:
    _cpu.set_threads(2)
    caller, slowed = _cpu.claimed_tiles(200, [200, 20_000])
    assert slowed < caller
    assert caller + slowed == 200


def test_workers_do_share_the_work(restored_threads: None) -> None:
    _cpu.set_threads(4)
    assert all(claimed > 0 for claimed in _cpu.claimed_tiles(400, [1000] * 4))


def test_results_are_the_same_with_far_more_threads_than_processors(restored_threads: None) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = _cpu.PackedLinear(torch.randn(300, 300, generator=generator))
    x = torch.randn(70, 300, generator=generator)
    want, got = torch.empty(70, 300), torch.empty(70, 300)
    packed(x, want)
    _cpu.set_threads(8 * (os.cpu_count() or 1))
    for _ in range(50):
        packed(x, got.zero_())
        assert torch.equal(got, want)


def test_several_python_threads_may_call_at_once_while_the_pool_is_resized(restored_threads: None) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = _cpu.PackedLinear(torch.randn(100, 100, generator=generator))
    x = torch.randn(30, 100, generator=generator)
    want = torch.empty(30, 100)
    packed(x, want)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(100):
            out = torch.empty(30, 100)
            packed(x, out)
            if not torch.equal(out, want):
                wrong.append(number)

    callers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for threads in (3, 1, 2, 5):
        _cpu.set_threads(threads)
    for caller in callers:
        caller.join()
    assert not wrong


def test_idle_workers_use_no_processor_time(restored_threads: None) -> None:
    _cpu.set_threads(4)
    _cpu.claimed_tiles(100, [0] * 4)
    time.sleep(0.05)  # past the spin
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1


def test_affinity_limits_the_threads_a_new_process_starts() -> None:
    one = min(os.sched_getaffinity(0))
    code = "from twinplane.kernels import _cpu; print(_cpu.cpus_granted(), _cpu.threads())"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {one})
    )
    assert out.stdout.split() == ["1", "1"]


def test_a_forked_child_computes_and_exits(restored_threads: None) -> None:
    """Only the calling thread survives a fork; it must do all tiles itself and not wait for the others."""
    _cpu.set_threads(3)
    _cpu.claimed_tiles(50, [0] * 3)
    code = (
        "import os, sys; from twinplane.kernels import _cpu; _cpu.set_threads(3); _cpu.claimed_tiles(50, [0] * 3)\n"
        "pid = os.fork()\n"
        "done = _cpu.claimed_tiles(50, [0] * 3)\n"
        "sys.exit(sum(done) != 50) if pid == 0 else sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("threads", [0, -1, 257])
def test_a_senseless_number_of_threads_is_refused_with_the_limits(threads: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 256, got {threads}"):
        _cpu.set_threads(threads)


def test_an_instruction_set_the_processor_lacks_is_refused_naming_those_it_has() -> None:
    with pytest.raises(ValueError, match=r'no "sse9" kernels; it has .*plain'):
        _cpu.set_isa("sse9")
