"""One plane as a process of its own, for tests: ``python peer.py control|data INSTANCE EPOCH [options]``.

The control side owns the instance, creates the session's segment and sends numbered steps; the data side answers each with one
to three results, fewer if it is interrupted. Every word of a step carries its number, every word of a result its own and whether
it is the step's last, so a torn, lost, doubled or reordered message is seen.
Prints one JSON line when started, one when attached and one at the end; exits 3 when the peer stopped answering.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable

import numpy as np
from twinplane.shared import segment
from twinplane.shared._shm import ControlEnd, DataEnd, ProtocolError, signal_at
from twinplane.shared.wire import Capacities, Phase

CAPACITIES = Capacities(
    ring_depth=4,
    max_rows=8,
    max_step_tokens=64,
    max_table_writes=16,
    max_copies=4,
    max_extra_words=16,
    max_results=16,
    max_swaps=4,
    max_candidates=16,
)
SECOND_NS = 1_000_000_000
PEER_GONE = 3


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def pauses(pattern: str, seed: int) -> Callable[[int], None]:
    """What a plane does between two messages: ``pause(sequence)``."""
    rng = random.Random(seed)

    def at_random(_: int) -> None:
        if rng.random() < 0.1:
            time.sleep(rng.random() * 50e-6)

    def burst_idle(sequence: int) -> None:
        if sequence % 500 == 0:
            time.sleep(rng.random() * 0.03)  # around the bound of 20 ms, on either side

    return {"none": lambda _: None, "random": at_random, "burst": burst_idle}[pattern]


def fill(slot: np.ndarray, sequence: int) -> None:
    slot.view(np.uint64)[:] = sequence


def verify(slot: np.ndarray, sequence: int) -> None:
    words = slot.view(np.uint64)
    if not (words == sequence).all():
        raise AssertionError(f"slot of {sequence} holds {np.unique(words)[:8]}")


def drive(end: ControlEnd, args: argparse.Namespace) -> None:
    """Send ``count`` steps with at most ``in_flight`` unanswered; take the results in order."""
    pause = pauses(args.pattern, seed=1)
    sent = answered = results = 0
    while answered < args.count:
        while sent < args.count and sent - answered < args.in_flight:
            slot = end.step_slot(args.timeout_ns)
            if slot is None:
                sys.exit(PEER_GONE)
            fill(slot, sent)
            end.publish()
            sent += 1
        pause(answered)
        got = end.wait_result(args.timeout_ns)
        if got is None:
            sys.exit(PEER_GONE)
        assert got == results
        slot = end.result(got)
        is_last = int(slot.view(np.uint64)[0]) % 2
        verify(slot, 2 * got + is_last)
        end.consume(got)
        results += 1
        answered += is_last
        if results % 7 == 0:
            end.interrupt(sent)


def answer(end: DataEnd, args: argparse.Namespace) -> None:
    """Answer ``count`` steps."""
    pause = pauses(args.pattern, seed=2)
    results = 0
    for expected in range(args.count):
        end.set_phase(Phase.IDLE, expected)
        got = end.wait_step(args.timeout_ns)
        if got is None:
            sys.exit(PEER_GONE)
        end.set_phase(Phase.FORWARD, got)
        assert got == expected
        verify(end.step(got), got)
        pause(got)
        is_last = False
        for substep in range(1 + got % 3):
            slot = end.result_slot(args.timeout_ns)
            if slot is None:
                sys.exit(PEER_GONE)
            is_last = substep == got % 3 or end.interrupted() > got
            fill(slot, 2 * results + is_last)
            end.publish()
            results += 1
            if is_last:
                break
        end.consume(got)


def wait_for_segment(name: str, epoch: int, bound_ns: int) -> DataEnd:
    """Attach as soon as the session of ``epoch`` stands. The lifeline's `welcome` tells this in service."""
    give_up = time.monotonic() + 20
    while True:
        try:
            fd = segment.open_segment(name)
            try:
                return DataEnd(fd, epoch, wait_bound_ns=bound_ns)
            finally:
                os.close(fd)
        except (segment.SegmentError, ProtocolError) as error:
            if time.monotonic() > give_up:
                raise TimeoutError(f"no segment {name} of epoch {epoch}") from error
            time.sleep(0.005)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["control", "data"])
    parser.add_argument("instance")
    parser.add_argument("epoch", type=int)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--pattern", default="none")
    parser.add_argument("--cpu", type=int, help="run on this CPU alone")
    parser.add_argument("--timeout-ns", type=int, default=SECOND_NS)
    parser.add_argument("--bound-ns", type=int, default=20_000_000)
    parser.add_argument("--signal-at", nargs=3, metavar=("POINT", "PASSAGE", "SIGNAL"))
    parser.add_argument("--rows", type=int, default=CAPACITIES.max_rows)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    say(started=os.getpid())
    if args.cpu is not None:
        os.sched_setaffinity(0, {args.cpu})
    signals = 0

    def count_signal(*_: object) -> None:
        nonlocal signals
        signals += 1

    signal.signal(signal.SIGUSR1, count_signal)
    if args.signal_at:
        point, passage, number = args.signal_at
        signal_at(point, int(passage), int(number))
    lock = segment.InstanceLock(args.instance)
    if args.role == "control":
        lock.acquire()
        made = segment.create_segment(args.instance, CAPACITIES._replace(max_rows=args.rows), args.epoch)
        end: ControlEnd | DataEnd = ControlEnd(made.fd, args.epoch, wait_bound_ns=args.bound_ns)
        made.close()
    else:
        end = wait_for_segment(lock.names.segment, args.epoch, args.bound_ns)
    end.start_heartbeat()
    say(attached=os.getpid())
    if isinstance(end, ControlEnd):
        drive(end, args)
    else:
        answer(end, args)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the interpreter's end resets handlers, not what is ignored
    steps = end.own()["published" if args.role == "control" else "consumed"]
    say(missed_wakes=end.missed_wakes, signals=signals, steps=steps, cpu_s=time.process_time())
    end.close()
    lock.release()


if __name__ == "__main__":
    main()
