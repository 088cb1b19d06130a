"""Preemption by swapping: what was computed waits in host memory and is not computed again."""

from __future__ import annotations

import pytest
from core_device import Request
from core_rig import Rig
from timed_device import TimedRig, linear_cost


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + 13 * seed + i * i * (seed + 1)) % 49 + 1 for i in range(length))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("cache", [True, False])
def test_swapped_sequences_come_back_with_all_they_had(cache: bool, depth: int) -> None:
    rig = Rig(num_blocks=24, num_host_blocks=64, depth=depth)
    for i in range(5):
        rig.submit(i, Request(prompt(12, i), max_tokens=50, cache=cache, seed=i))
    rig.run()
    stats = rig.stats()
    assert stats.preemptions > 0 and stats.blocks_swapped_out == stats.blocks_swapped_in > 0
    assert stats.prompt_tokens_computed <= 5 * 12 + stats.preemptions, "nothing is computed twice"


def test_without_room_in_the_host_pool_it_is_computed_again() -> None:
    rig = Rig(num_blocks=24, num_host_blocks=2)
    for i in range(5):
        rig.submit(i, Request(prompt(12, i), max_tokens=50, cache=False))
    rig.run()
    stats = rig.stats()
    assert stats.preemptions > 0 and stats.blocks_swapped_out == 0 and stats.prompt_tokens_computed > 100


@pytest.mark.parametrize(("swap_block_ns", "swaps"), [(1, True), (10**9, False)])
def test_swapping_that_costs_more_than_computing_is_not_done(swap_block_ns: int, swaps: bool) -> None:
    rig = Rig(num_blocks=24, num_host_blocks=64, swap_block_ns=swap_block_ns)
    for i in range(5):
        rig.submit(i, Request(prompt(12, i), max_tokens=50))
    rig.run()
    assert rig.stats().preemptions > 0 and (rig.stats().blocks_swapped_out > 0) == swaps


@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_is_swapped_as_a_whole_and_shares_again(depth: int) -> None:
    rig = Rig(num_blocks=26, num_host_blocks=64, depth=depth)
    rig.submit(0, Request(prompt(12, 1), max_tokens=80))
    rig.submit(10, Request(prompt(13), max_tokens=24, seed=7, n=3, cache=False))
    rig.run()
    stats = rig.stats()
    assert stats.preemptions >= 3 and stats.blocks_swapped_in > 0


@pytest.mark.parametrize("which", [10, 11])
def test_a_member_cancelled_while_its_group_is_swapped_out(which: int) -> None:
    rig = Rig(num_blocks=26, num_host_blocks=64)
    rig.submit(0, Request(prompt(12, 1), max_tokens=80))
    rig.submit(10, Request(prompt(13), max_tokens=24, seed=7, n=3))
    while not rig.stats().blocks_swapped_out:
        assert rig.turn()
    rig.cancel(which)
    rig.run()


def test_a_lost_data_plane_takes_what_was_swapped_with_it() -> None:
    rig = Rig(num_blocks=24, num_host_blocks=64)
    for i in range(5):
        rig.submit(i, Request(prompt(12, i), max_tokens=50))
    while not rig.stats().blocks_swapped_out:
        assert rig.turn()
    rig.detach()
    rig.attach(24, 4, None)
    rig.run()


def test_the_cache_may_have_got_more_meanwhile_than_was_saved() -> None:
    rig = Rig(num_blocks=15, num_host_blocks=64, max_chunk_tokens=2, policy="priority")
    rig.submit(0, Request(prompt(8, 1), max_tokens=12, priority=1))
    rig.turn()
    rig.submit(1, Request(prompt(40), max_tokens=4))
    while not rig.stats().blocks_swapped_out:
        assert rig.turn()
    saved = rig.stats().blocks_swapped_out
    rig.submit(2, Request(prompt(40), max_tokens=2, priority=2))  # computes the same prompt before the first one is back
    before = rig.stats().prompt_tokens_computed
    rig.run()
    assert 0 < saved < 10 and rig.stats().blocks_swapped_in == saved
    assert rig.stats().prompt_tokens_computed - before <= 41, "the prompt is computed once"


def crowded(swap_us: float, swap_block_ns: int) -> TimedRig:
    """Has served far more than its blocks hold; a swap takes ``swap_us``, and was measured as ``swap_block_ns`` both ways."""
    cost = linear_cost(constant=1_000, decode=10, token=100, swap=swap_us)
    rig = TimedRig(cost, num_blocks=60, host_blocks=1_000, swap_block_ns=swap_block_ns, max_model_len=900)
    for _ in range(60):
        rig.submit(150, 150)
    while rig.turn():
        pass
    return rig


@pytest.mark.parametrize("swap_us", [0.0, 200.0, 2_000.0])
def test_what_swaps_really_take_is_learned_from_the_steps_that_do(swap_us: float) -> None:
    """Measured at start as 200 us a block and way. Recomputing 200 tokens takes 20 ms, swapping their 13 blocks 26 x swap_us."""
    rig = crowded(swap_us, swap_block_ns=400_000)
    stats = rig.scheduler.stats()
    assert stats.preemptions > 20
    if swap_us <= 200:
        assert stats.prompt_tokens_computed <= 60 * 150 + stats.preemptions, "nothing is computed twice"
    else:
        swapping = sum(1 for step, _ in rig.steps if len(step.swap_outs))
        assert 1 <= swapping <= 4, "it was tried, and found to be dear"


def test_a_step_that_swaps_says_nothing_about_the_cost_of_prompts() -> None:
    rig = crowded(50.0, swap_block_ns=100_000)
    stats = rig.scheduler.stats()
    assert stats.blocks_swapped_in > 200
    assert stats.step_margin < 1.25 and stats.predicted_us == pytest.approx(stats.step_us, rel=0.1)


def test_what_is_still_cached_on_return_is_not_paid_for_by_swapping_it_out() -> None:
    """At 700 us a block and way, swapping is a little cheaper than computing everything again, and dearer than computing the rest."""
    swapped = []
    for cache in (False, True):
        cost = linear_cost(constant=1_000, decode=10, token=100, swap=700.0)
        rig = TimedRig(cost, num_blocks=56, host_blocks=1_000, swap_block_ns=1_400_000, max_model_len=900)
        for _ in range(40):
            rig.submit(150, 200, cache=cache)
        while rig.turn():
            pass
        assert rig.scheduler.stats().preemptions > 20
        swapped.append(rig.scheduler.stats().blocks_swapped_out)
    assert 2 * swapped[1] < swapped[0]
