"""The workloads, on an engine that answers at once."""

from __future__ import annotations

import asyncio

import pytest
from twinplane.benchmarks import workloads
from twinplane.benchmarks.load import Outcome, Recorder, Request, lognormal_requests, percentile, summary
from twinplane.benchmarks.workloads import WORKLOADS


class Engine:
    """Answers a token every ``step_s``, and remembers what it was asked. ``missing`` tokens are left out of each answer."""

    def __init__(self, step_s: float = 0.0, missing: int = 0) -> None:
        self.requests: list[Request] = []
        self._step_s, self._missing = step_s, missing

    async def generate(self, request: Request) -> Outcome:
        self.requests.append(request)
        recorder = Recorder()
        for _ in range(request.max_tokens - self._missing):
            await asyncio.sleep(self._step_s)
            recorder.message(request.samples)
        return recorder.end()


@pytest.mark.parametrize("name", ["W1", "W2", "W4", "W5"])
async def test_every_run_asks_the_same(name):
    first, second = Engine(), Engine()
    await WORKLOADS[name].run(first.generate)
    await WORKLOADS[name].run(second.generate)
    assert first.requests == second.requests
    assert all(3 <= token < workloads.VOCAB_SIZE for request in first.requests for token in request.prompt)


async def test_the_workloads_are_as_published():
    engine = Engine()
    figures = await workloads.one_stream(engine.generate)
    assert [(len(r.prompt), r.max_tokens) for r in engine.requests] == [(128, 128)] * 4
    assert figures["decode_tokens_per_s"] > 0 and figures["prefill_tokens_per_s"] > 0

    engine = Engine()
    await workloads.crowd(engine.generate)
    load = engine.requests[1:]
    assert len(load) == 32 and max(len(r.prompt) for r in load) <= 512 and max(r.max_tokens for r in load) <= 256

    engine = Engine()
    await workloads.system_prompt(engine.generate)
    assert [len(r.prompt) for r in engine.requests] == [2032] * 18
    shared = {r.prompt[:2000] for r in engine.requests[1:]}
    assert len(shared) == 1 and len({r.prompt[2000:] for r in engine.requests[1:]}) == 17
    assert engine.requests[0].prompt[:2000] not in shared, "what warms the engine up must not fill its cache"

    engine = Engine()
    await workloads.samples(engine.generate)
    assert {(len(r.prompt), r.max_tokens, r.samples) for r in engine.requests} == {(512, 64, 4)}


async def test_no_two_requests_of_a_run_begin_alike_unless_they_are_to():
    for name in ("W1", "W2", "W5"):
        engine = Engine()
        await WORKLOADS[name].run(engine.generate)
        beginnings = [request.prompt[:4] for request in engine.requests]
        assert len(set(beginnings)) == len(beginnings), name


@pytest.mark.parametrize("name", ["W1", "W2", "W4", "W5"])
async def test_an_answer_that_is_too_short_spoils_the_run(name):
    with pytest.raises(RuntimeError, match="tokens instead of"):
        await WORKLOADS[name].run(Engine(missing=1).generate)


async def test_the_first_long_prompts_are_waited_for_and_later_ones_cancelled():
    cancelled = []

    async def generate(request: Request) -> Outcome:
        try:
            return await Engine(step_s=1.0 if len(request.prompt) == 100 and len(asked) > 0 else 0.01).generate(request)
        except asyncio.CancelledError:
            cancelled.append(request)
            raise
        finally:
            asked.append(request)

    asked: list[Request] = []
    figures = await workloads.interference(generate, streams=2, stream_tokens=60, prompt_tokens=100, period_s=0.1)
    assert figures["long_prompts_arrived"] == figures["long_prompts_answered"] + len(cancelled)
    assert figures["long_prompts_answered"] == 4 and len(cancelled) >= 1
    assert figures["long_ttft_p50_s"] >= 1.0 and figures["wall_s"] < 3.0, "the streams' time does not include the waiting"


async def test_interference_measures_streams_and_long_prompts():
    figures = await workloads.interference(Engine(step_s=0.002).generate, streams=2, stream_tokens=50, prompt_tokens=100, period_s=0.05)
    assert figures["errors"] == 0 and figures["long_prompts_answered"] >= 1
    assert 2 <= figures["itl_p50_ms"] <= figures["itl_p99_ms"] <= figures["itl_max_ms"]


async def test_several_tokens_of_one_message_do_not_count_as_decoded_before_the_first():
    async def generate(request: Request) -> Outcome:
        recorder = Recorder()
        recorder.message(64)
        await asyncio.sleep(0.1)
        recorder.message(64)
        return recorder.end()

    figures = await workloads.one_stream(generate, repeats=1)
    assert 64 / 0.2 < figures["decode_tokens_per_s"] <= 64 / 0.1


def test_lengths_are_lognormal_around_their_mean():
    lengths = [len(request.prompt) for request in lognormal_requests(2000, vocab_size=1000, seed=1)]
    assert 150 < sum(lengths) / len(lengths) < 170 and max(lengths) == 512


def test_a_message_without_tokens_is_not_counted():
    recorder = Recorder()
    recorder.message(0)
    recorder.message(2, [5, 6])
    outcome = recorder.end()
    assert (outcome.counts, outcome.tokens, outcome.gaps) == ([2], [5, 6], [])


def test_percentiles_and_summary():
    assert percentile([], 0.5) == 0 and percentile([3, 1, 2], 0.5) == 2 and percentile([1, 2], 0.99) == 2
    outcomes = [Outcome(counts=[1, 3], first_token=0.5, gaps=[0.25]), Outcome(error="refused")]
    figures = summary(outcomes, 2.0)
    assert (figures["output_tokens_per_s"], figures["errors"], figures["ttft_p50_ms"], figures["itl_max_ms"]) == (2.0, 1, 500, 250)
