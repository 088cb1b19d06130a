"""Round trip of a step and its result between two processes, against a bare futex ping-pong in the same run.

``run()`` alternates the two, so that both meet the same machine. The native numbers are the protocol's cost; the Python
one is what a data plane written in Python sees.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from twinplane.shared import _shm
from twinplane.shared.wire import PAGE, Capacities

CAPACITIES = Capacities(
    ring_depth=4,
    max_rows=256,
    max_step_tokens=2048,
    max_table_writes=512,
    max_copies=64,
    max_extra_words=4096,
    max_results=256,
    max_swaps=64,
    max_candidates=0,
)
EPOCH = 1
_TIMEOUT_NS = 10_000_000_000
_WARM_UP = 200  # round trips at the start of each run that are not counted


def run(round_trips: int = 20_000, payload_bytes: int = 64, rounds: int = 5) -> dict[str, Any]:
    """Measure; microseconds per round trip.

    Args:
        round_trips: of each kind, over all rounds.
        payload_bytes: written and read in each slot. The default, a cache line, measures the hand-over; a steady decode of 64
            sequences takes about 2 KiB, whose way from core to core counts as well.
        rounds: how often ring and futex take turns.
    """
    each = max(round_trips // rounds, 1) + _WARM_UP
    samples: dict[str, list[int]] = {"ring": [], "futex": [], "python": []}
    for _ in range(rounds):
        samples["ring"] += _measure_ring(each, payload_bytes)[_WARM_UP:]
        samples["futex"] += _measure_futex(each)[_WARM_UP:]
        samples["python"] += _measure_python(each)[_WARM_UP:]
    out: dict[str, Any] = {
        "cpus": len(os.sched_getaffinity(0)),
        "round_trips": len(samples["ring"]),
        "payload_bytes": payload_bytes,
    }
    for name, values in samples.items():
        p50, p99 = np.percentile(values, (50, 99)) / 1000
        out[f"{name}_p50_us"], out[f"{name}_p99_us"] = round(float(p50), 2), round(float(p99), 2)
    out["ring_to_futex"] = round(out["ring_p50_us"] / out["futex_p50_us"], 2)
    return out


def _measure_ring(count: int, payload_bytes: int) -> list[int]:
    with _segment() as fd, _other_side("answer_ring", fd, EPOCH, count, payload_bytes):
        return _shm.measure_ring(fd, EPOCH, count, payload_bytes)


def _measure_futex(count: int) -> list[int]:
    with _memory() as fd, _other_side("answer_futex", fd, count):
        os.truncate(fd, PAGE)
        return _shm.measure_futex(fd, count)


def _measure_python(count: int) -> list[int]:
    """The same exchange through ControlEnd and DataEnd; the payload is one word, numpy's cost is not the ring's."""
    samples = []
    with _segment() as fd, _other_side("answer_python", fd, count):
        end = _shm.ControlEnd(fd, EPOCH)
        for _ in range(count):
            start = time.perf_counter_ns()
            slot = end.step_slot(_TIMEOUT_NS)
            if slot is None:
                raise RuntimeError("the other process has not answered for 10 s")
            slot[0] = 1
            end.publish()
            sequence = end.wait_result(_TIMEOUT_NS)
            if sequence is None:
                raise RuntimeError("the other process has not answered for 10 s")
            end.result(sequence)
            end.consume(sequence)
            samples.append(time.perf_counter_ns() - start)
        end.close()
    return samples


def answer_python(fd: int, count: int) -> None:
    """The data plane's side of :func:`_measure_python`."""
    end = _shm.DataEnd(fd, EPOCH)
    for _ in range(count):
        sequence = end.wait_step(_TIMEOUT_NS)
        slot = end.result_slot(_TIMEOUT_NS)
        if sequence is None or slot is None:
            raise RuntimeError("the other process has not sent for 10 s")
        end.step(sequence)
        slot[0] = 1
        end.publish()
        end.consume(sequence)


@contextmanager
def _memory() -> Iterator[int]:
    fd = os.memfd_create("twinplane-bench")
    try:
        os.truncate(fd, _shm.segment_bytes(CAPACITIES))
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _segment() -> Iterator[int]:
    with _memory() as fd:
        _shm.format_segment(fd, CAPACITIES, EPOCH)
        yield fd


@contextmanager
def _other_side(name: str, fd: int, *arguments: int) -> Iterator[None]:
    """A second process that runs the named function; the first waits for it before measuring, by the protocol itself."""
    command = [sys.executable, __file__, name, str(fd), *map(str, arguments)]
    process = subprocess.Popen(command, pass_fds=[fd])
    try:
        yield
        if process.wait(30) != 0:
            raise RuntimeError(f"the other process ended with status {process.returncode}")
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        others: dict[str, Callable[..., None]] = {
            "answer_ring": _shm.answer_ring,
            "answer_futex": _shm.answer_futex,
            "answer_python": answer_python,
        }
        others[sys.argv[1]](*map(int, sys.argv[2:]))
    else:
        for key, value in run().items():
            print(f"{key:16} {value}")
