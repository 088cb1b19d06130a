"""The exact LRU cache that the scheduler's prefix cache is measured against."""

from __future__ import annotations

import pytest
from twinplane.control_plane.simulator.lru import hit_share
from twinplane.control_plane.simulator.traces import Row, Run, build, output_stream


def trace_of(*prompts: list[Run], output: int = 1):
    return build("test", [Row(None, sum(run.length for run in runs), output, runs) for runs in prompts])


def test_whole_blocks_at_the_beginning_are_found():
    a, b = Run(1, 0, 30), Run(2, 0, 10)
    assert hit_share(trace_of([a], [a, b]), block_tokens=8) == pytest.approx(24 / 70)
    assert hit_share(trace_of([a], [b, a]), block_tokens=8) == 0.0  # the same tokens, elsewhere


def test_the_last_token_is_never_found():
    a = Run(1, 0, 32)
    assert hit_share(trace_of([a], [a]), block_tokens=8) == pytest.approx(24 / 64)


def test_an_answer_is_found_by_the_next_turn():
    turn = Run(1, 0, 10)
    trace = trace_of([turn], [turn, Run(output_stream(0), 0, 7), Run(1, 10, 4)], output=7)
    assert hit_share(trace, block_tokens=8) == pytest.approx(16 / 31)  # 10 + 6 computed tokens of the first turn


def test_the_least_recently_used_block_goes_first_and_ends_go_before_beginnings():
    a, b = Run(1, 0, 17), Run(2, 0, 17)
    # Room for three blocks of 8. a: a0 a1. b: b0 b1 pushes out a1. a again finds a0, and brings a1 back for b1.
    assert hit_share(trace_of([a], [b], [a]), block_tokens=8, capacity_tokens=24) == pytest.approx(8 / 51)
    assert hit_share(trace_of([a], [b], [a], [b]), block_tokens=8, capacity_tokens=24) == pytest.approx(16 / 68)
    assert hit_share(trace_of([a], [b], [a]), block_tokens=8) == pytest.approx(16 / 51)


def test_blocks_may_begin_in_one_run_and_end_in_another():
    runs = [Run(1, 0, 5), Run(2, 0, 5), Run(3, 0, 7)]
    assert hit_share(trace_of(runs, runs), block_tokens=8) == pytest.approx(16 / 34)
    assert hit_share(trace_of(runs, [Run(1, 0, 5), Run(2, 1, 12)]), block_tokens=8) == 0.0
