"""Several sequences of one request against the real engine: samples as if alone, beams as transformers finds them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from oracle import Oracle
from twinplane.benchmarks.server import Server
from twinplane.client import Client, SequenceResult

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address) as connected:
        yield connected


def tokens(sequences: list[SequenceResult]) -> list[list[int]]:
    return [sequence.token_ids for sequence in sequences]


def test_samples_are_those_of_fewer_samples_and_the_first_is_the_one_drawn_alone(client: Client, prompts: list[tuple[int, ...]]) -> None:
    for seed, prompt in enumerate(prompts[:4]):
        options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "seed": seed, "ignore_eos": True}
        four = tokens(client.generate(prompt, n=4, **options).sequences)
        assert tokens(client.generate(prompt, n=2, **options).sequences) == four[:2]
        assert client.generate(prompt, **options).token_ids == four[0]
        assert tokens(client.stream(prompt, n=4, **options).result().sequences) == four
        assert len({tuple(answer) for answer in four}) == 4


def test_samples_share_the_prompt_and_end_each_at_its_own_stop(client: Client, prompts: list[tuple[int, ...]]) -> None:
    prompt = max(prompts, key=len)[:120]
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "n": 4, "ignore_eos": True}
    whole = client.generate(prompt, **options)
    assert whole.usage.prompt_tokens == len(prompt)
    assert whole.usage.completion_tokens == 160
    stop = whole.sequences[1].text[10:14]
    cut = client.generate(prompt, stop=stop, **options)
    for before, after in zip(whole.sequences, cut.sequences, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert (after.finish.stop_string == stop) == (stop in before.text)
        assert after.token_ids == before.token_ids[: len(after.token_ids)]


def test_best_of_returns_the_samples_with_the_highest_mean_log_probability(client: Client, prompts: list[tuple[int, ...]]) -> None:
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "seed": 11, "ignore_eos": True}
    every = client.generate(prompts[0], n=5, logprobs=True, **options).sequences
    means = [sum(sequence.logprobs) / len(sequence.logprobs) for sequence in every]
    order = sorted(range(5), key=lambda index: -means[index])[:2]
    best = client.generate(prompts[0], n=2, best_of=5, **options).sequences
    assert tokens(best) == [every[index].token_ids for index in order]
    assert [sequence.score for sequence in best] == pytest.approx([means[index] for index in order], rel=1e-5)


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"), [(2, 1.0, "heuristic"), (4, 1.0, "first"), (4, 0.0, "never"), (3, 2.0, "heuristic")]
)
def test_beams_are_those_transformers_finds(
    client: Client, oracle: Oracle, prompts: list[tuple[int, ...]], width: int, length_penalty: float, early_stopping: Any
) -> None:
    """With a common word as the end, so that hypotheses of many lengths compete."""
    for prompt in prompts[:3]:
        end = client.generate(prompt, max_tokens=6, temperature=0, ignore_eos=True).token_ids[-1]
        for stops in ((), (end,)):
            expected = oracle.beams(
                prompt, 12, width=width, length_penalty=length_penalty, early_stopping=early_stopping, stop_token_ids=stops
            )
            got = client.generate(
                prompt, max_tokens=12, ignore_eos=True, stop_token_ids=stops, beam_width=width, length_penalty=length_penalty,
                early_stopping=early_stopping,
            ).sequences  # fmt: skip
            assert tokens(got) == [hypothesis for hypothesis, _ in expected]
            assert [sequence.score for sequence in got] == pytest.approx([score for _, score in expected], abs=2e-4)


def test_beams_share_a_server_with_samples_and_plain_requests(client: Client, prompts: list[tuple[int, ...]]) -> None:
    kinds: list[dict[str, Any]] = [{"beam_width": 4}, {"n": 3, "seed": 5, "temperature": 0.8}, {"temperature": 0}] * 2

    def one(index: int) -> list[list[int]]:
        return tokens(client.generate(prompts[index], max_tokens=8, ignore_eos=True, **kinds[index]).sequences)

    alone = [one(index) for index in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(6))) == alone
    assert client.load().running_requests == 0
