"""Requests and what they showed, over gRPC or any other way to send them; a closed loop of them: so many streams at once, each
sending its next request when the last is done."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
from twinplane.v1 import generation_pb2 as pb
from twinplane.v1 import generation_pb2_grpc as rpc

TOP_K = 40  # of requests for several samples
_SIGMA = 0.6  # of the lognormal lengths


@dataclass(frozen=True)
class Request:
    """A prompt of token ids and how many tokens to generate (EOS is ignored, so it is exact)."""

    prompt: tuple[int, ...]
    max_tokens: int
    cancel_after: int | None = None  # tokens after which the client goes away
    samples: int = 1  # more than one are drawn at temperature 1 from the TOP_K likeliest tokens; one is greedy

    @property
    def total_tokens(self) -> int:
        """Tokens of a complete answer, over all samples."""
        return self.samples * self.max_tokens


@dataclass
class Outcome:
    """What one request showed. Times in seconds; ``gaps`` are inter-message times, the client's view of ITL."""

    tokens: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # new tokens of each message
    first_token: float = 0.0
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    error: str = ""
    cancelled: bool = False

    @property
    def generated(self) -> int:
        """Tokens received. Some engines name only part of them in ``tokens``."""
        return sum(self.counts)


class Recorder:
    """Fills an Outcome as the messages of a stream come in; its clock starts when it is made."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._start = self._last = time.perf_counter()

    def message(self, count: int, tokens: Sequence[int] = ()) -> None:
        """A message with ``count`` new tokens; one without any is not counted."""
        if count == 0:
            return
        now = time.perf_counter()
        if self.outcome.counts:
            self.outcome.gaps.append(now - self._last)
        else:
            self.outcome.first_token = now - self._start
        self.outcome.counts.append(count)
        self.outcome.tokens += tokens
        self._last = now

    def end(self, error: str = "") -> Outcome:
        self.outcome.error = error
        self.outcome.total = time.perf_counter() - self._start
        return self.outcome


Generate = Callable[[Request], Awaitable[Outcome]]  # how a request is sent: the only thing in which engines differ here


Watch = Callable[[Outcome], None]  # is shown an outcome as it grows, after every message


async def generate(stub: rpc.GenerationServiceStub, request: Request, *, text: bool = False, watch: Watch | None = None) -> Outcome:
    """Stream one request and time it, as token ids or as text too."""
    sampling = pb.SamplingParams(temperature=0.0)
    if request.samples > 1:
        sampling = pb.SamplingParams(temperature=1.0, top_k=TOP_K, n=request.samples)
    message = pb.StreamGenerateRequest(
        request=pb.GenerateRequest(
            tokens=pb.TokenIds(ids=request.prompt),
            sampling=sampling,
            stop=pb.StopParams(max_tokens=request.max_tokens, ignore_eos=True),
            output=pb.OutputParams(text=text),
        )
    )
    recorder = Recorder()
    outcome = recorder.outcome
    call = stub.StreamGenerate(message)
    try:
        async for response in call:
            new = [token for delta in response.deltas for token in delta.token_ids]
            recorder.message(len(new), new)
            if response.HasField("usage"):
                outcome.cached_tokens = response.usage.cached_prompt_tokens
            if watch is not None:
                watch(outcome)
            if request.cancel_after is not None and outcome.generated >= request.cancel_after:
                call.cancel()
                outcome.cancelled = True
                break
    except grpc.aio.AioRpcError as error:
        return recorder.end(f"{error.code().name}: {error.details()}")
    return recorder.end()


@contextlib.asynccontextmanager
async def connect(address: str, *, text: bool = False, watch: Watch | None = None) -> AsyncIterator[Generate]:
    """One channel to a Twinplane server, as a way to send requests."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]

        async def send(request: Request) -> Outcome:
            return await generate(stub, request, text=text, watch=watch)

        yield send


async def at_concurrency(generate: Generate, requests: Sequence[Request], concurrency: int) -> tuple[list[Outcome], float]:
    """Run all requests, ``concurrency`` at a time; outcomes in the order of the requests, and the wall time in seconds."""
    todo = list(enumerate(requests))
    outcomes: list[Outcome] = [Outcome() for _ in requests]

    async def stream() -> None:
        while todo:
            index, request = todo.pop(0)
            outcomes[index] = await generate(request)

    start = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(concurrency)))
    return outcomes, time.perf_counter() - start


async def closed_loop(address: str, requests: Sequence[Request], concurrency: int) -> tuple[list[Outcome], float]:
    """``at_concurrency`` against the Twinplane server at ``address``."""
    async with connect(address) as send:
        return await at_concurrency(send, requests, concurrency)


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
    firsts = [outcome.first_token for outcome in outcomes if outcome.counts]
    return {
        "requests": len(outcomes),
        "errors": sum(bool(outcome.error) for outcome in outcomes),
        "output_tokens_per_s": round(sum(outcome.generated for outcome in outcomes) / wall, 2),
        "ttft_p50_ms": round(percentile(firsts, 0.5) * 1e3, 2),
        "ttft_p99_ms": round(percentile(firsts, 0.99) * 1e3, 2),
        "itl_p50_ms": round(percentile(gaps, 0.5) * 1e3, 2),
        "itl_p99_ms": round(percentile(gaps, 0.99) * 1e3, 2),
        "itl_max_ms": round(max(gaps, default=0.0) * 1e3, 2),
        "wall_s": round(wall, 2),
    }
