"""A closed-loop load over gRPC: so many streams at once, each sending its next request when the last is done."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from twinplane.v1 import generation_pb2 as pb
from twinplane.v1 import generation_pb2_grpc as rpc

_SIGMA = 0.6  # of the lognormal lengths


@dataclass(frozen=True)
class Request:
    """A prompt of token ids and how many tokens to generate (EOS is ignored, so it is exact)."""

    prompt: tuple[int, ...]
    max_tokens: int
    cancel_after: int | None = None  # tokens after which the client goes away


@dataclass
class Outcome:
    """What one request showed. Times in seconds; ``gaps`` are inter-message times, the client's view of ITL."""

    tokens: list[int] = field(default_factory=list)
    first_token: float = 0.0
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    error: str = ""
    cancelled: bool = False


async def generate(stub: rpc.GenerationServiceStub, request: Request) -> Outcome:
    """Stream one request greedily and time it."""
    message = pb.StreamGenerateRequest(
        request=pb.GenerateRequest(
            tokens=pb.TokenIds(ids=request.prompt),
            sampling=pb.SamplingParams(temperature=0.0),
            stop=pb.StopParams(max_tokens=request.max_tokens, ignore_eos=True),
            output=pb.OutputParams(text=False),
        )
    )
    outcome = Outcome()
    start = last = time.perf_counter()
    call = stub.StreamGenerate(message)
    try:
        async for response in call:
            now = time.perf_counter()
            new = [token for delta in response.deltas for token in delta.token_ids]
            if new:
                if outcome.tokens:
                    outcome.gaps.append(now - last)
                else:
                    outcome.first_token = now - start
                outcome.tokens += new
                last = now
            if response.HasField("usage"):
                outcome.cached_tokens = response.usage.cached_prompt_tokens
            if request.cancel_after is not None and len(outcome.tokens) >= request.cancel_after:
                call.cancel()
                outcome.cancelled = True
                break
    except grpc.aio.AioRpcError as error:
        outcome.error = f"{error.code().name}: {error.details()}"
    outcome.total = time.perf_counter() - start
    return outcome


async def closed_loop(address: str, requests: Sequence[Request], concurrency: int) -> tuple[list[Outcome], float]:
    """Run all requests, ``concurrency`` at a time; outcomes in the order of the requests, and the wall time in seconds."""
    todo = list(enumerate(requests))
    outcomes: list[Outcome] = [Outcome() for _ in requests]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]

        async def stream() -> None:
            while todo:
                index, request = todo.pop(0)
                outcomes[index] = await generate(stub, request)

        start = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(concurrency)))
        return outcomes, time.perf_counter() - start


def lognormal_requests(
    count: int, *, vocab_size: int, seed: int = 0, mean_in: int = 160, max_in: int = 512, mean_out: int = 128, max_out: int = 256
) -> list[Request]:
    """Random-token prompts with lognormal lengths (workload W2 of the performance document)."""
    draw = random.Random(seed)

    def length(mean: int, most: int) -> int:
        mu = math.log(mean) - _SIGMA**2 / 2  # so that the mean is `mean`
        return max(4, min(most, round(draw.lognormvariate(mu, _SIGMA))))

    requests = []
    for _ in range(count):
        prompt = tuple(draw.randrange(3, vocab_size) for _ in range(length(mean_in, max_in)))
        requests.append(Request(prompt, length(mean_out, max_out)))
    return requests


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0..1) of the values lie; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summary(outcomes: Sequence[Outcome], wall: float) -> dict[str, float]:
    """Throughput and latencies of a finished run."""
    gaps = [gap for outcome in outcomes for gap in outcome.gaps]
    firsts = [outcome.first_token for outcome in outcomes if outcome.tokens]
    return {
        "requests": len(outcomes),
        "errors": sum(bool(outcome.error) for outcome in outcomes),
        "output_tokens_per_s": round(sum(len(outcome.tokens) for outcome in outcomes) / wall, 2),
        "ttft_p50_ms": round(percentile(firsts, 0.5) * 1e3, 2),
        "ttft_p99_ms": round(percentile(firsts, 0.99) * 1e3, 2),
        "itl_p50_ms": round(percentile(gaps, 0.5) * 1e3, 2),
        "itl_p99_ms": round(percentile(gaps, 0.99) * 1e3, 2),
        "itl_max_ms": round(max(gaps, default=0.0) * 1e3, 2),
        "wall_s": round(wall, 2),
    }
