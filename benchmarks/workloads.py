"""The workloads W1 to W5 of the performance document, for anything that can send a request: Twinplane over gRPC, and its peers.

Each is a coroutine function of ``generate`` (how a request is sent), whose other parameters default to the workload as published. It sends
something of the same shape first, which is not counted: an engine is measured as it is after a minute of service. Prompts are random
token ids, the same for every engine. Answers have exactly as many tokens as asked for; if one has not, RuntimeError is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from .load import Generate, Outcome, Request, at_concurrency, lognormal_requests, percentile, summary

VOCAB_SIZE = 49152  # of the demo model
_FIRST_ID = 3  # below are control tokens
_LONG_WAITED_FOR = 4  # long prompts of W3 that are answered in any case
_SHORT_OUTPUT = 4  # of requests of which only the first token matters

Figures = dict[str, float]


@dataclass(frozen=True)
class Workload:
    """One of the published workloads: what it is, and how it is run."""

    name: str
    what: str
    run: Callable[[Generate], Awaitable[Figures]]


class _Prompts:
    """Random prompts, from one seed."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(_FIRST_ID, VOCAB_SIZE) for _ in range(count))


def _checked(outcomes: Sequence[Outcome], requests: Sequence[Request]) -> None:
    """Raise RuntimeError unless every request was answered in full: a comparison of unequal work would mean nothing."""
    for outcome, request in zip(outcomes, requests, strict=True):
        if outcome.error:
            raise RuntimeError(f"a request failed: {outcome.error}")
        if outcome.generated != request.total_tokens:
            raise RuntimeError(f"a request was answered with {outcome.generated} tokens instead of {request.total_tokens}")


async def _in_turn(generate: Generate, requests: Sequence[Request]) -> list[Outcome]:
    outcomes, _ = await at_concurrency(generate, requests, 1)
    _checked(outcomes, requests)
    return outcomes


async def one_stream(generate: Generate, *, prompt: int = 128, output: int = 128, repeats: int = 3, seed: int = 0) -> Figures:
    """W1. Medians over ``repeats`` requests, one after the other. Decoding starts with the first token's message, prefill ends there."""
    prompts = _Prompts(seed)
    requests = [Request(prompts.tokens(prompt), output) for _ in range(1 + repeats)]
    outcomes = (await _in_turn(generate, requests))[1:]
    decode = [(outcome.generated - outcome.counts[0]) / sum(outcome.gaps) for outcome in outcomes]
    return {
        "decode_tokens_per_s": round(statistics.median(decode), 2),
        "prefill_tokens_per_s": round(statistics.median(prompt / outcome.first_token for outcome in outcomes), 1),
    }


async def crowd(generate: Generate, *, requests: int = 32, concurrency: int = 16, seed: int = 0) -> Figures:
    """W2. Lognormal prompts (mean 160, at most 512) and outputs (mean 128, at most 256), in a closed loop."""
    await _in_turn(generate, [Request(_Prompts(seed + 1).tokens(512), 16)])
    load = lognormal_requests(requests, vocab_size=VOCAB_SIZE, seed=seed)
    outcomes, wall = await at_concurrency(generate, load, concurrency)
    _checked(outcomes, load)
    return summary(outcomes, wall)


async def interference(
    generate: Generate,
    *,
    streams: int = 8,
    stream_prompt: int = 32,
    stream_tokens: int = 256,
    prompt_tokens: int = 3000,
    period_s: float = 3.0,
    seed: int = 0,
) -> Figures:
    """W3. Streams, and long prompts that arrive in an open loop until the streams are done.

    What is then unanswered is cancelled, except for the first four long prompts: ``long_ttft_p50_s`` is the median of these, which came at
    the same times whatever the engine. ``long_ttft_answered_*`` are of all that were answered, and so look better where fewer were.
    """
    prompts = _Prompts(seed)

    def long() -> Request:
        return Request(prompts.tokens(prompt_tokens), _SHORT_OUTPUT)

    await _in_turn(generate, [long()])
    longs: list[asyncio.Future[Outcome]] = []

    async def arrivals() -> None:
        while True:
            longs.append(asyncio.ensure_future(generate(long())))
            await asyncio.sleep(period_s)

    load = [Request(prompts.tokens(stream_prompt), stream_tokens) for _ in range(streams)]
    arriving = asyncio.create_task(arrivals())
    outcomes, wall = await at_concurrency(generate, load, streams)
    arriving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await arriving
    for task in longs[_LONG_WAITED_FOR:]:
        task.cancel()  # where there is something left to cancel
    first = await asyncio.gather(*longs[:_LONG_WAITED_FOR])
    ended = await asyncio.gather(*longs, return_exceptions=True)
    _checked(outcomes, load)
    _checked(first, [long()] * len(first))
    answered = [outcome for outcome in ended if isinstance(outcome, Outcome)]
    firsts = [outcome.first_token for outcome in answered if outcome.counts]
    gaps = [gap for outcome in outcomes for gap in outcome.gaps]
    return {
        "itl_p50_ms": round(percentile(gaps, 0.5) * 1e3, 2),
        "itl_p99_ms": round(percentile(gaps, 0.99) * 1e3, 2),
        "itl_max_ms": round(max(gaps, default=0.0) * 1e3, 2),
        "stream_tokens_per_s": round(sum(outcome.generated for outcome in outcomes) / wall, 2),
        "long_prompts_arrived": len(longs),
        "long_prompts_answered": len(firsts),
        "long_ttft_p50_s": round(statistics.median(outcome.first_token for outcome in first), 3),
        "long_ttft_answered_p50_s": round(percentile(firsts, 0.5), 3),
        "long_ttft_answered_max_s": round(max(firsts, default=0.0), 3),
        "errors": sum(bool(outcome.error) for outcome in answered),
        "wall_s": round(wall, 2),
    }


async def system_prompt(
    generate: Generate, *, system_tokens: int = 2000, tail_tokens: int = 32, warm: int = 16, rounds: int = 1, seed: int = 0
) -> Figures:
    """W4. Each round has a system prompt of its own, asked cold and then ``warm`` times with other tails, one request after the other."""
    prompts = _Prompts(seed)
    requests = [Request(prompts.tokens(system_tokens + tail_tokens), _SHORT_OUTPUT)]
    for _ in range(rounds):
        system = prompts.tokens(system_tokens)
        requests += [Request(system + prompts.tokens(tail_tokens), _SHORT_OUTPUT) for _ in range(1 + warm)]
    outcomes = (await _in_turn(generate, requests))[1:]
    colds = [outcome.first_token for outcome in outcomes[:: 1 + warm]]
    warms = [outcome for i, outcome in enumerate(outcomes) if i % (1 + warm)]
    cold, hit = percentile(colds, 0.5), percentile([outcome.first_token for outcome in warms], 0.5)
    return {
        "cold_ttft_ms": round(cold * 1e3, 1),
        "warm_ttft_ms": round(hit * 1e3, 2),
        "warm_p99_ttft_ms": round(percentile([outcome.first_token for outcome in warms], 0.99) * 1e3, 2),
        "ratio": round(cold / hit, 1),
        "cached_tokens": percentile([outcome.cached_tokens for outcome in warms], 0.5),
    }


async def samples(generate: Generate, *, count: int = 4, prompt: int = 512, output: int = 64, repeats: int = 3, seed: int = 0) -> Figures:
    """W5. ``count`` samples of one prompt, in one request; output tokens over the whole of its time. Median of ``repeats`` requests."""
    prompts = _Prompts(seed)
    requests = [Request(prompts.tokens(prompt), output, samples=count) for _ in range(1 + repeats)]
    outcomes = (await _in_turn(generate, requests))[1:]
    return {"output_tokens_per_s": round(statistics.median(outcome.generated / outcome.total for outcome in outcomes), 2)}


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "one stream, 128 tokens in and out", one_stream),
        Workload("W2", "32 requests, 16 at a time, lognormal lengths", crowd),
        Workload("W3", "eight streams, a 3,000-token prompt every 3 s", interference),
        Workload("W4", "a 2,000-token system prompt, cold and cached", system_prompt),
        Workload("W5", "four samples of a 512-token prompt", samples),
    )
}
