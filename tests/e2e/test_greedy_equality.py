"""Greedy tokens equal transformers' in fp32, whatever the batch, the chunks, the overlap and the memory (INV-10)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from oracle import Oracle
from prompts import NEW_TOKENS
from twinplane.benchmarks.load import Outcome, Request, closed_loop
from twinplane.benchmarks.server import Server
from twinplane.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]

BLOCK_BYTES = 16 * 46080  # 16 tokens x 2 x 30 layers x 3 heads x 64 x 4 bytes
Serve = Callable[..., Server]
Prompts = list[tuple[int, ...]]
Answers = list[list[int]]
ROOMY = ("--kv-cache-bytes", "512MiB")


@pytest.fixture(scope="session")
def expected(model: Path, oracle: Oracle, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Each prompt's answer when it is alone on a server without overlap, checked against transformers."""
    with Server(model, *ROOMY, "--overlap-depth", "1", log=tmp_path_factory.mktemp("alone") / "server.log") as server:
        answers = [outcome.tokens for outcome in ask(server, prompts, concurrency=1)]
    assert [len(answer) for answer in answers] == [NEW_TOKENS] * len(prompts)
    assert [mistake for prompt, answer in zip(prompts, answers, strict=True) for mistake in oracle.mistakes(prompt, answer)] == []
    return answers


def ask(server: Server, prompts: Sequence[tuple[int, ...]], concurrency: int) -> list[Outcome]:
    outcomes, _ = asyncio.run(closed_loop(server.address, [Request(p, NEW_TOKENS) for p in prompts], concurrency))
    assert [o.error for o in outcomes if o.error] == []
    return outcomes


def assert_equal(outcomes: Sequence[Outcome], expected: Sequence[Sequence[int]]) -> None:
    wrong = [i for i, (outcome, right) in enumerate(zip(outcomes, expected, strict=True)) if outcome.tokens != right]
    assert wrong == [], f"{len(wrong)} of {len(expected)} differ; the first: {outcomes[wrong[0]].tokens} != {expected[wrong[0]]}"


def test_B02_tokens_are_the_same_alone_together_and_in_reverse(serve: Serve, prompts: Prompts, expected: Answers) -> None:
    with serve(*ROOMY) as server:
        assert_equal(ask(server, prompts, concurrency=1), expected)
        assert_equal(ask(server, prompts, concurrency=len(prompts)), expected)
        assert_equal(ask(server, prompts[::-1], concurrency=len(prompts)), expected[::-1])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_tokens_do_not_depend_on_chunk_cap_or_overlap_depth(
    serve: Callable[..., Server], prompts, expected, chunk: int, depth: int
) -> None:
    with serve(*ROOMY, "--max-num-batched-tokens", "2048", "--max-chunk-tokens", str(chunk), "--overlap-depth", str(depth)) as server:
        assert_equal(ask(server, prompts, concurrency=len(prompts)), expected)


@pytest.mark.parametrize(("depth", "swap"), [(1, "0"), (2, "0"), (2, "256MiB")])
def test_A06_tokens_survive_preemption_in_a_pool_of_a_fraction_of_the_need(
    serve: Serve, prompts: Prompts, expected: Answers, depth: int, swap: str
) -> None:
    blocks = 100  # all 32 sequences need 370 at their ends
    options = (
        "--kv-cache-bytes",
        str(blocks * BLOCK_BYTES),
        "--max-model-len",
        "1024",
        "--overlap-depth",
        str(depth),
        "--swap-space",
        swap,
    )
    with serve(*options) as server:
        outcomes = ask(server, prompts, concurrency=len(prompts))
        assert_equal(outcomes, expected)
        assert sum(event.get("preemptions", 0) for event in server.log_events()) > 0, "the pool was too large to force a preemption"
        with Client(server.address) as client:
            assert client.load().used_kv_blocks == 0
    measured = [event["swap_block_us"] > 0 for event in server.log_events() if "swap_block_us" in event]
    assert measured == [swap != "0"] * 2, "told by the data plane and taken in by the control plane"
    swapped = next(event["swapped_blocks"] for event in server.log_events() if event["event"] == "scheduler")
    assert (swapped > 0) == (swap != "0")


def test_tokens_survive_neighbours_that_cancel_at_random(serve: Serve, prompts: Prompts, expected: Answers) -> None:
    draw = random.Random(7)
    requests, kept = [], []
    for prompt, right in zip(prompts, expected, strict=True):
        requests += [Request(prompt, NEW_TOKENS), Request(prompt[::-1] or prompt, NEW_TOKENS, cancel_after=draw.randrange(1, NEW_TOKENS))]
        kept.append(right)
    with serve(*ROOMY) as server:
        outcomes, _ = asyncio.run(closed_loop(server.address, requests, len(requests)))
        assert_equal(outcomes[::2], kept)
        assert all(o.cancelled for o in outcomes[1::2])
