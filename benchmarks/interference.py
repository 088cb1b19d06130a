"""What long prompts do to running streams: eight streams of 256 tokens while a 3,000-token prompt arrives every three seconds.

``twinplane bench interference --itl-target-ms 150`` runs a server with that target and measures as a client over gRPC. A target of 0 is the
same load without one. The prompts are an open loop: they arrive whether or not those before are done, so on a slow machine they queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from twinplane.v1 import generation_pb2_grpc as rpc

from .load import Outcome, Request, generate, percentile
from .server import Server, demo_model

_VOCAB = 49152
_STREAM_PROMPT = 32
_LONG_OUTPUT = 4


def run(
    itl_target_ms: int = 150,
    streams: int = 8,
    stream_tokens: int = 256,
    prompt_tokens: int = 3000,
    period_ms: int = 3000,
    options: Sequence[str] = (),
) -> dict[str, object]:
    """Inter-token latency of the streams, their tokens per second, and the long prompts' time to first token."""
    with tempfile.TemporaryDirectory() as folder:
        target = ("--itl-target-ms", str(itl_target_ms), "--kv-cache-bytes", "2GiB")
        with Server(demo_model(), *target, *options, log=Path(folder) / "server.log") as server:
            outcomes, longs, arrived, wall = asyncio.run(_load(server.address, streams, stream_tokens, prompt_tokens, period_ms / 1e3))
        scheduler = next(event for event in server.log_events() if event["event"] == "scheduler")
    gaps = [gap for outcome in outcomes for gap in outcome.gaps]
    firsts = [outcome.first_token for outcome in longs if outcome.tokens]
    return {
        "itl_target_ms": itl_target_ms,
        "itl_p50_ms": round(percentile(gaps, 0.5) * 1e3, 2),
        "itl_p99_ms": round(percentile(gaps, 0.99) * 1e3, 2),
        "itl_max_ms": round(max(gaps, default=0.0) * 1e3, 2),
        "stream_tokens_per_s": round(sum(len(outcome.tokens) for outcome in outcomes) / wall, 2),
        "long_prompts_arrived": arrived,
        "long_prompts_answered": len(firsts),
        "long_ttft_p50_s": round(percentile(firsts, 0.5), 3),
        "long_ttft_max_s": round(max(firsts, default=0.0), 3),
        "errors": sum(bool(outcome.error) for outcome in outcomes + longs),
        "wall_s": round(wall, 2),
        **{name: scheduler[name] for name in ("step_margin", "over_itl_target", "tick_us", "host_gap_us")},
    }


async def _load(
    address: str, streams: int, stream_tokens: int, prompt_tokens: int, period_s: float
) -> tuple[list[Outcome], list[Outcome], int, float]:
    """Run until the streams are done; long prompts that are not done by then are cancelled, and have no outcome."""
    draw = random.Random(0)

    def request(length: int, output: int) -> Request:
        return Request(tuple(draw.randrange(3, _VOCAB) for _ in range(length)), output)

    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        # One prompt before anybody waits: the engine has then met every shape, as a server that has run for a minute has.
        await generate(stub, request(prompt_tokens, _LONG_OUTPUT))
        longs: list[asyncio.Task[Outcome]] = []

        async def arrivals() -> None:
            while True:
                longs.append(asyncio.create_task(generate(stub, request(prompt_tokens, _LONG_OUTPUT))))
                await asyncio.sleep(period_s)

        start = time.perf_counter()
        arriving = asyncio.create_task(arrivals())
        outcomes = await asyncio.gather(*(generate(stub, request(_STREAM_PROMPT, stream_tokens)) for _ in range(streams)))
        wall = time.perf_counter() - start
        arriving.cancel()
        for task in longs:
            if not task.done():
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await arriving
        ended = await asyncio.gather(*longs, return_exceptions=True)
        return list(outcomes), [outcome for outcome in ended if isinstance(outcome, Outcome)], len(longs), wall
