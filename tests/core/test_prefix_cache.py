"""The prefix cache on the fake device: what is found, what is not, and that answers never depend on it (INV-10)."""

from __future__ import annotations

import hashlib

import pytest
from core_device import Request
from core_rig import Rig
from twinplane.shared import wire

BLOCK = 4


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + 13 * seed + i * i * (seed + 1)) % 49 + 1 for i in range(length))


def key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def ask(rig: Rig, request_id: int, request: Request) -> int:
    """Serves the request to its end; its cached tokens."""
    assert rig.submit(request_id, request) is None
    rig.run()
    last = rig.records[request_id].last
    assert last is not None
    return int(last.cached_tokens)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 8 * BLOCK])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_A08_a_prompt_that_is_cached_whole_computes_one_token(length: int, max_tokens: int, depth: int) -> None:
    rig = Rig(depth=depth)
    request = Request(prompt(length), max_tokens=max_tokens)
    assert ask(rig, 1, request) == 0
    full = (length + max_tokens - 1) // BLOCK * BLOCK  # the last token is never stored
    # Everything but the last token, if it lies in a full block: the rest of that block is copied.
    expected = min(full, length - 1)
    assert ask(rig, 2, request) == expected
    assert rig.records[2].tokens == rig.records[1].tokens
    longer = Request(prompt(length) + prompt(9, 3), max_tokens=max_tokens)
    assert ask(rig, 3, longer) >= min(full, length - 1)


def test_A07_answers_are_the_same_cold_warm_extended_cut_and_after_eviction() -> None:
    rig = Rig(num_blocks=64, max_model_len=200)
    base = prompt(140)
    assert ask(rig, 1, Request(base)) == 0
    for i in range(2, 5):
        assert ask(rig, i, Request(base)) == 139
    assert ask(rig, 5, Request(base + prompt(9, 1))) >= 140
    assert ask(rig, 6, Request(base + prompt(9, 2))) >= 140
    assert ask(rig, 7, Request(base[:70] + prompt(30, 4))) >= 68
    for i in range(8, 12):
        ask(rig, i, Request(prompt(120, i)))  # unrelated: evicts
    assert ask(rig, 12, Request(base)) < 139
    rig.check_at_rest()


def test_A09_hits_and_misses_in_one_step() -> None:
    rig = Rig(max_step_tokens=200, max_chunk_tokens=64)
    warm = prompt(24)
    ask(rig, 1, Request(warm))
    for i, tokens in enumerate((warm + prompt(5, 1), prompt(17, 2), warm + prompt(6, 3), prompt(3, 4)), start=2):
        rig.submit(i, Request(tokens))
    step = rig.tick()
    assert step is not None and len(step.opens) == 4
    rig.run()
    cached = [rig.records[i].last.cached_tokens for i in range(2, 6)]  # type: ignore[union-attr]
    assert cached[0] >= 24 and cached[2] >= 24 and cached[1] == cached[3] == 0


def test_A13_keys_keep_caches_apart() -> None:
    rig = Rig()
    tokens = prompt(40)
    assert ask(rig, 1, Request(tokens, cache_key=key("salt a"))) == 0
    assert ask(rig, 2, Request(tokens, cache_key=key("salt a"))) == 39
    assert ask(rig, 3, Request(tokens, cache_key=key("salt b"))) == 0
    assert ask(rig, 4, Request(tokens)) == 0
    assert ask(rig, 5, Request(tokens)) == 39


def test_a_request_without_cache_neither_finds_nor_leaves_anything() -> None:
    rig = Rig()
    tokens = prompt(40)
    assert ask(rig, 1, Request(tokens, cache=False)) == 0
    assert rig.stats().blocks_cached == 0
    assert ask(rig, 2, Request(tokens)) == 0
    assert ask(rig, 3, Request(tokens, cache=False)) == 0


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    rig = Rig()
    ask(rig, 1, Request(prompt(10), max_tokens=30))
    answer = tuple(rig.records[1].tokens)
    conversation = prompt(10) + answer + prompt(5, 1)
    # The last token was never computed; the one before ends a block at 36.
    assert ask(rig, 2, Request(conversation, max_tokens=3)) >= 36


def test_part_of_a_block_is_copied() -> None:
    rig = Rig(block_size=8)
    ask(rig, 1, Request(prompt(16)))
    rig.submit(2, Request(prompt(13) + (49,) * 5))
    step = rig.tick()
    assert step is not None and len(step.copies) == 1
    rig.run()
    assert rig.records[2].last is not None and rig.records[2].last.cached_tokens == 13


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_equal_prompts_are_computed_once(depth: int) -> None:
    rig = Rig(depth=depth, max_chunk_tokens=16, max_step_tokens=48)
    for i in range(5):
        rig.submit(i, Request((*prompt(60), i), max_tokens=4))
    rig.run()
    assert rig.stats().prompt_tokens_computed <= 61 + 4 * (1 + BLOCK)


def test_whoever_waits_for_a_prompt_goes_on_when_its_computer_is_cancelled() -> None:
    rig = Rig(max_chunk_tokens=8, max_step_tokens=16)
    rig.submit(1, Request(prompt(60)))
    rig.submit(2, Request(prompt(60)))
    rig.submit(3, Request(prompt(20, 5)))
    rig.turn()
    rig.turn()
    assert rig.order("waiting") == [2]  # 3 is not held up by it
    rig.cancel(1)
    rig.run()
    assert rig.records[2].last is not None and rig.records[2].last.cached_tokens >= 16


def test_reset_forgets_what_is_cached_and_what_is_in_use() -> None:
    rig = Rig()
    ask(rig, 1, Request(prompt(40)))
    rig.submit(2, Request(prompt(30, 1), max_tokens=20))
    for _ in range(4):
        rig.turn()
    rig.scheduler.reset_prefix_cache()
    rig.check()
    assert rig.stats().blocks_cached == 0
    assert ask(rig, 3, Request(prompt(40))) == 0
    assert ask(rig, 4, Request(prompt(30, 1))) == 0
    rig.check_at_rest()


def test_A14_a_new_session_begins_with_an_empty_cache() -> None:
    """Weights only ever change with the data plane that holds them."""
    rig = Rig()
    ask(rig, 1, Request(prompt(40)))
    rig.detach()
    rig.attach(64, 4, None)
    assert ask(rig, 2, Request(prompt(40))) == 0


def test_a_pool_full_of_cached_blocks_serves_a_request_that_needs_all_of_it() -> None:
    rig = Rig(num_blocks=16)
    ask(rig, 1, Request(prompt(50)))
    rig.submit(2, Request(prompt(50)[:30] + prompt(20, 1), max_tokens=15))  # 64 positions: the whole pool
    rig.run()
    assert rig.records[2].finish


def test_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    rig = Rig(num_blocks=24, max_rows=2)
    ask(rig, 1, Request(prompt(32, 1), max_tokens=1))  # 8 blocks each
    ask(rig, 2, Request(prompt(32, 2), max_tokens=1))
    ask(rig, 1, Request(prompt(32, 1), max_tokens=1))  # used again
    ask(rig, 3, Request(prompt(40, 3), max_tokens=1))  # takes what was free and some of the second
    assert ask(rig, 4, Request(prompt(32, 1), max_tokens=1)) == 31
    cached = ask(rig, 5, Request(prompt(32, 2), max_tokens=1))
    assert 0 < cached < 31


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_requests_find_what_was_not_evicted(depth: int) -> None:
    rig = Rig(num_blocks=24, depth=depth)
    for i in range(6):
        rig.submit(i, Request(prompt(20, i), max_tokens=30))
    rig.run()
    assert rig.stats().preemptions > 0 and rig.stats().cached_tokens > 0


def test_table_writes_of_a_hit_name_the_cached_blocks() -> None:
    rig = Rig()
    ask(rig, 1, Request(prompt(40), max_tokens=1))
    cached = set(rig.snapshot()["tree_blocks"])
    rig.submit(2, Request(prompt(40), max_tokens=1))
    step = rig.tick()
    assert step is not None
    named = [block for _, _, block in step.table_writes.tolist()]
    assert len(set(named) & cached) == 9 and len(named) == len(set(named))
    assert step.seqs[0]["position"] == 39 and step.seqs[0]["flags"] & wire.SeqFlag.SAMPLES
