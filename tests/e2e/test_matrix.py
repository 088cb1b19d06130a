"""INV-10 on the real model, in one table: the same tokens whatever the scheduler does.

One mix of requests (greedy, seeded, samples, beams) is served alone, one after the other, and that is checked against transformers. Then
each cell of ``MATRIX`` serves the mix at once in another way, and shows that its way was really gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle
from twinplane.benchmarks.server import Server
from twinplane.client import Client, GenerateResult

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

BLOCK_BYTES = 16 * 46080  # 16 tokens x 2 x 30 layers x 3 heads x 64 x 4 bytes
NEW_TOKENS = 44
BEAM_TOKENS = 10
ARRIVAL_S = 0.02  # from one request to the next
STEM = 50  # tokens that all prompts begin with

# How many tokens follow the stem, and what is asked for. Penalties tell prompt and output apart. In order of arrival: the last ones yield
# when memory is short, and beams are never swapped.
MIX: tuple[tuple[int, dict[str, Any]], ...] = (
    (25, {"beam_width": 3, "max_tokens": BEAM_TOKENS}),
    (20, {"temperature": 1.0, "seed": 3, "n": 3}),
    (1, {"temperature": 0}),
    (14, {"temperature": 0}),
    (43, {"temperature": 0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}),
    (90, {"temperature": 0}),
    (9, {"temperature": 0.9, "seed": 1}),
    (30, {"temperature": 0.8, "seed": 2, "top_p": 0.9, "presence_penalty": 0.3}),
)
Answers = list[GenerateResult]
Proof = Callable[[Answers, dict[str, Any]], bool]  # of answers and the server's last `scheduler` record: it went that way


@dataclass(frozen=True)
class Cell:
    """A way to serve the mix: options of the server, and what shows that they mattered."""

    options: tuple[str, ...]
    proof: Proof = lambda answers, scheduler: True
    rounds: int = 1
    request: dict[str, Any] | None = None  # options of every request


def pool_of(blocks: int) -> tuple[str, ...]:
    return ("--kv-cache-bytes", str(blocks * BLOCK_BYTES), "--max-model-len", "224")


def cached(answers: Answers, scheduler: dict[str, Any]) -> bool:
    return sum(answer.usage.cached_prompt_tokens >= STEM for answer in answers) >= len(MIX)


def preempted(answers: Answers, scheduler: dict[str, Any]) -> bool:
    return scheduler["preemptions"] > 0 and scheduler["swapped_blocks"] == 0


def swapped(answers: Answers, scheduler: dict[str, Any]) -> bool:
    return scheduler["preemptions"] > 0 and scheduler["swapped_blocks"] > 0


def in_substeps(answers: Answers, scheduler: dict[str, Any]) -> bool:
    return scheduler["substeps"] > 1.2 * scheduler["steps"]


ROOMY = ("--kv-cache-bytes", "256MiB")
SHORT = pool_of(24)  # the mix needs some 80 at its end, without sharing; the largest request alone, 16
SWAP = ("--swap-space", "128MiB")
# Another way to schedule is one more cell.
MATRIX = {
    "together, depth 1": Cell((*ROOMY, "--overlap-depth", "1"), request={"prefix_cache": False}),
    "together, depth 2": Cell((*ROOMY, "--overlap-depth", "2"), request={"prefix_cache": False}),
    "cached": Cell(ROOMY, cached, rounds=2),
    "small chunks, depth 3": Cell((*ROOMY, "--max-chunk-tokens", "7", "--overlap-depth", "3")),
    "recomputed, depth 1": Cell((*SHORT, "--overlap-depth", "1"), preempted, request={"prefix_cache": False}),
    "recomputed, depth 2": Cell((*SHORT, "--overlap-depth", "2"), preempted, request={"prefix_cache": False}),
    "swapped, depth 1": Cell((*SHORT, *SWAP, "--overlap-depth", "1"), swapped, request={"prefix_cache": False}),
    "swapped, depth 2": Cell((*SHORT, *SWAP, "--overlap-depth", "2"), swapped, request={"prefix_cache": False}),
    "fair share in few rows": Cell((*ROOMY, "--policy", "fair", "--max-num-seqs", "4", "--tenant-weights", "b=3")),
    "substeps, depth 1": Cell((*ROOMY, "--overlap-depth", "1", "--max-substeps", "8"), in_substeps),
    "substeps, depth 2": Cell((*ROOMY, "--overlap-depth", "2", "--max-substeps", "5"), in_substeps),
    "substeps, recomputed": Cell((*SHORT, "--max-substeps", "8"), preempted, request={"prefix_cache": False}),
    "all of it": Cell(
        (
            *SHORT,
            *SWAP,
            "--policy",
            "fair",
            "--overlap-depth",
            "3",
            "--max-chunk-tokens",
            "11",
            "--itl-target-ms",
            "150",
            "--max-substeps",
            "4",
        ),
        rounds=2,
    ),
}


@pytest.fixture(scope="module")
def mix(prompts: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    text = max(prompts, key=len)
    bodies = [text[i + STEM :] for i in range(len(MIX))]  # each goes on differently from the first token on
    common = {"max_tokens": NEW_TOKENS, "ignore_eos": True}
    return [((*text[:STEM], *body[:tail]), common | options) for body, (tail, options) in zip(bodies, MIX, strict=True)]


def tokens(answer: GenerateResult) -> list[list[int]]:
    return [sequence.token_ids for sequence in answer.sequences]


@pytest.fixture(scope="module")
def alone(model: Path, oracle: Oracle, mix: list[Any], tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """One request after the other, nothing shared and nothing in flight; greedy ones and beams as transformers has them."""
    log = tmp_path_factory.mktemp("alone") / "server.log"
    with Server(model, *ROOMY, "--overlap-depth", "1", log=log) as server, Client(server.address) as client:
        answers = [client.generate(prompt, prefix_cache=False, **options) for prompt, options in mix]
    assert all(answer.usage.cached_prompt_tokens == 0 for answer in answers)
    for (prompt, options), answer in zip(mix, answers, strict=True):
        if "beam_width" in options:
            expected = oracle.beams(prompt, BEAM_TOKENS, width=options["beam_width"])
            assert tokens(answer) == [hypothesis for hypothesis, _ in expected]
        elif options["temperature"] == 0 and "frequency_penalty" not in options:
            assert oracle.mistakes(prompt, answer.token_ids) == []
    samples = tokens(answers[1])
    assert len(samples) == 3 and len({tuple(sample) for sample in samples}) == 3
    return [tokens(answer) for answer in answers]


@pytest.mark.parametrize("cell", MATRIX.values(), ids=MATRIX)
def test_the_same_tokens(cell: Cell, serve: Callable[..., Server], mix: list[Any], alone: list[list[list[int]]]) -> None:
    answers: Answers = []
    with serve(*cell.options) as server, Client(server.address, tenant="a") as a, Client(server.address, tenant="b") as b:
        start = threading.Barrier(len(mix))

        def one(index: int) -> GenerateResult:
            prompt, options = mix[index]
            start.wait(30)
            time.sleep(ARRIVAL_S * index)
            return (a, b)[index % 2].generate(prompt, **(cell.request or {}), **options)

        with ThreadPoolExecutor(len(mix)) as pool:
            for _ in range(cell.rounds):
                answers += pool.map(one, range(len(mix)))
        assert a.load().running_requests == a.load().used_kv_blocks == 0
    wrong = [i for i, answer in enumerate(answers) if tokens(answer) != alone[i % len(mix)]]
    assert wrong == [], f"{[MIX[i % len(mix)] for i in wrong]}: {tokens(answers[wrong[0]])} != {alone[wrong[0] % len(mix)]}"
    scheduler = [event for event in server.log_events() if event["event"] == "scheduler"][-1]
    assert cell.proof(answers, scheduler), scheduler
