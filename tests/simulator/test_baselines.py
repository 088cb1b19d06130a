"""The systems that the production scheduler is compared to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_rig import flat_device, ms, random_trace, token_device, trace_of
from twinplane.control_plane import _core, _simulator

FINISHED, REFUSED = 1, 2
OPTIONS = _simulator.Options()


# --- the buddy allocator ---


@st.composite
def histories(draw):
    """An arena and what happens in it: sizes to allocate, negative numbers for which of the taken pieces to release."""
    return draw(st.integers(1, 3000)), draw(st.lists(st.integers(-10, 700), max_size=80))


@given(histories())
@settings(max_examples=150, deadline=None)
def test_pieces_never_overlap_and_everything_comes_back(history):
    size, moves = history
    arena = _simulator.BuddyAllocator(size)
    taken: list[tuple[int, int]] = []  # address, rounded size
    for move in moves:
        if move > 0:
            rounded = 1 << (move - 1).bit_length()
            address = arena.allocate(move)
            if address is None:
                continue
            assert address % rounded == 0 and address + rounded <= size
            assert all(address + rounded <= a or a + s <= address for a, s in taken)
            taken.append((address, rounded))
        elif taken:
            address, _ = taken.pop(-move % len(taken))
            arena.release(address)
        assert arena.allocated == sum(s for _, s in taken)
    for address, _ in taken:
        arena.release(address)
    # Merged again: the arena gives what an untouched one gives, largest piece first.
    fresh = _simulator.BuddyAllocator(size)
    pieces = [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
    assert arena.largest == pieces[0]
    for piece in pieces:
        assert arena.allocate(piece) == fresh.allocate(piece) is not None
    assert arena.allocated == size and arena.allocate(1) is None


def test_the_smallest_piece_that_is_large_enough_is_cut():
    arena = _simulator.BuddyAllocator(8 + 2)
    assert arena.allocate(2) == 8  # not the piece of 8
    assert arena.allocate(8) == 0


@pytest.mark.parametrize("size", [0, -1])
def test_nothing_can_not_be_allocated(size):
    with pytest.raises((ValueError, TypeError)):
        _simulator.BuddyAllocator(16).allocate(size)


def test_releasing_what_is_not_taken_is_an_error():
    arena = _simulator.BuddyAllocator(16)
    with pytest.raises(RuntimeError):
        arena.release(0)


# --- contiguous memory ---


def contiguous(trace, reservation, *, capacity_tokens=1024, max_model_len=256, max_batch=64, device=None):
    return _simulator.contiguous(
        trace,
        device or flat_device(),
        OPTIONS,
        reservation=reservation,
        capacity_tokens=capacity_tokens,
        max_model_len=max_model_len,
        max_batch=max_batch,
    )


def test_max_reserves_the_longest_sequence_there_can_be():
    # 1,024 slots hold four sequences of 256, however short they are; the fifth waits for an iteration in which one leaves.
    result = contiguous(trace_of(*[(0, 10, 3)] * 5), "max")
    assert ms(result["first_scheduled_s"]) == [0, 0, 0, 0, 30]
    assert ms(result["finish_s"]) == [30, 30, 30, 30, 60]
    averages = result["averages"]
    # 12 of 256 are ever used: held 10, 11, 12; four at a time for 30 ms, then one.
    assert averages["overreserved_tokens"] == pytest.approx(244 * 2.5)
    assert averages["held_tokens"] == pytest.approx(11 * 2.5)
    assert averages["reserved_tokens"] == pytest.approx(1 * 2.5)


def test_pow2_and_oracle_fit_more():
    # in 10, out 6: Pow2 reserves 10 + 8 (a piece of 32), Oracle 16.
    rows = trace_of(*[(0, 10, 6)] * 64)
    assert contiguous(rows, "pow2", capacity_tokens=256)["averages"]["running"] == pytest.approx(8)
    assert contiguous(rows, "oracle", capacity_tokens=256)["averages"]["running"] == pytest.approx(16)


def test_iteration_level_scheduling_joins_and_leaves_at_every_step():
    result = contiguous(trace_of((0, 4, 2), (5, 4, 4)), "oracle")
    assert ms(result["first_token_s"]) == [10, 20] and ms(result["finish_s"]) == [20, 50]


def test_what_is_longer_than_the_arena_is_refused():
    result = contiguous(trace_of((0, 200, 100), (0, 4, 1)), "oracle", capacity_tokens=200, max_model_len=4096)
    assert list(result["outcome"]) == [REFUSED, FINISHED]


def test_an_unknown_reservation_is_refused():
    with pytest.raises(ValueError, match="max, pow2 or oracle"):
        contiguous(trace_of((0, 4, 1)), "best")


# --- static batches ---


def test_a_static_batch_pads_and_answers_together():
    # Two fit. Prompts of 2 and 5: a first step of 2 x 5 tokens; then steps of 2 until the longer answer (3) is done.
    result = _simulator.static(
        trace_of((0, 2, 1), (0, 5, 3), (1, 1, 1)), token_device(), OPTIONS, capacity_tokens=32, max_model_len=16, max_batch=8
    )
    assert ms(result["first_token_s"]) == [10, 10, 15]
    assert ms(result["finish_s"]) == [14, 14, 15]
    assert list(result["tokens"]) == [1, 3, 1]


def test_a_static_batch_needs_room_for_one():
    with pytest.raises(ValueError, match="does not hold one sequence"):
        _simulator.static(trace_of((0, 2, 1)), flat_device(), OPTIONS, capacity_tokens=8, max_model_len=16, max_batch=8)


# --- prefill first ---


def prefill_first(trace, device, **changes):
    limits = {"max_model_len": 256, "max_batch": 8, "max_prefill_tokens": 256} | changes
    pool = _core.Pool(num_blocks=limits.pop("num_blocks", 1000), block_size=4)
    return _simulator.prefill_first(trace, device, OPTIONS, pool=pool, **limits)


def test_prompts_hold_up_decodes():
    #  0..4  A's prompt;  4..5 A decodes, B arrives at 4.5;  5..14 B's prompt alone;  14..16 both decode
    result = prefill_first(trace_of((0, 4, 4), (4.5, 9, 2)), token_device())
    assert ms(result["first_token_s"]) == [4, 14]
    assert ms(result["finish_s"]) == [17, 16]
    assert sorted(ms(result["gaps_s"])) == [1, 1, 2, 11]


def test_prefill_first_recomputes_the_latest_when_blocks_run_out():
    rows = [(0, 4, 12)] * 3
    result = prefill_first(trace_of(*rows), flat_device(), num_blocks=8)
    assert list(result["outcome"]) == [FINISHED] * 3 and list(result["tokens"]) == [12] * 3
    assert result["preemptions"].sum() > 0 and result["preemptions"][0] == 0


# --- all of them ---


@pytest.mark.parametrize("system", ["max", "pow2", "oracle", "static", "prefill-first"])
def test_every_token_is_accounted_for(system):
    trace = random_trace(11)
    native = trace.native()
    if system == "static":
        result = _simulator.static(native, flat_device(), OPTIONS, capacity_tokens=1024, max_model_len=128, max_batch=64)
    elif system == "prefill-first":
        result = prefill_first(native, flat_device(), num_blocks=64)
    else:
        result = contiguous(native, system, max_model_len=128)
    assert (result["outcome"] == FINISHED).all()
    assert (result["tokens"] == trace.output_tokens).all()
    assert len(result["gaps_s"]) == int(trace.output_tokens.sum()) - len(trace)
    assert (result["first_token_s"] > result["arrival_s"]).all() and (result["finish_s"] >= result["first_token_s"]).all()
    samples = result["memory"]
    assert (samples["held_tokens"] + samples["reserved_tokens"] <= samples["allocated_tokens"]).all()
    assert (samples["allocated_tokens"] <= samples["capacity_tokens"]).all()
    assert np.isfinite(result["finish_s"]).all()
