"""A long run under load with cancels: does anything grow, is anything left? ``twinplane bench soak minutes=10``."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import grpc
import psutil
from twinplane.client import Client
from twinplane.v1 import generation_pb2_grpc as rpc

from .load import Outcome, Request, generate
from .server import Server, demo_model
from .workloads import VOCAB_SIZE

_SAMPLE_PERIOD_S = 5.0
_CANCEL_SHARE = 0.3


def memory_mib(process: psutil.Process) -> float:
    """Anonymous memory of a process in MiB: what leaks grow. Mapped files and shared memory are left out."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return (int(fields["RssAnon"].split()[0]) + int(fields["VmSwap"].split()[0])) / 1024


def random_request(draw: random.Random) -> Request:
    prompt = tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(1, 120)))
    max_tokens = draw.randrange(1, 48)
    leaves = draw.random() < _CANCEL_SHARE
    return Request(prompt, max_tokens, cancel_after=draw.randrange(0, max_tokens) if leaves else None)


async def _load(address: str, concurrency: int, end: float, outcomes: list[Outcome]) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]

        async def stream(seed: int) -> None:
            draw = random.Random(seed)
            while time.monotonic() < end:
                outcomes.append(await generate(stub, random_request(draw)))

        await asyncio.gather(*(stream(seed) for seed in range(concurrency)))


async def _sample(server: Server, end: float, samples: list[dict[str, float]]) -> None:
    planes = {name: server.plane(name) for name in ("control-plane", "data-plane")}
    start = time.monotonic()
    while time.monotonic() < end:
        await asyncio.sleep(_SAMPLE_PERIOD_S)
        sample = {"t_s": round(time.monotonic() - start, 1)}
        for name, process in planes.items():
            sample[f"{name}_mib"] = round(memory_mib(process), 2)
            sample[f"{name}_fds"] = process.num_fds()
            sample[f"{name}_threads"] = process.num_threads()
        samples.append(sample)
        print(json.dumps(sample), file=sys.stderr, flush=True)


def slope_kib_per_request(samples: list[dict[str, float]], key: str, requests_per_s: float) -> float:
    """Least-squares growth of ``key`` over the second half of the run, in KiB per request."""
    half = samples[len(samples) // 2 :]
    times, values = [s["t_s"] for s in half], [s[key] * 1024 for s in half]
    mean_t, mean_v = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_t) ** 2 for t in times)
    slope = sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread if spread else 0.0
    return slope / requests_per_s if requests_per_s else 0.0


def run(minutes: float = 10, concurrency: int = 32, options: tuple[str, ...] = ("--kv-cache-bytes", "256MiB")) -> dict[str, object]:
    """Run the soak; the figures say what grew per request in the second half, and what was left at the end."""
    outcomes: list[Outcome] = []
    samples: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, Server(demo_model(), *options, log=Path(folder) / "server.log") as server:
        end = time.monotonic() + minutes * 60

        async def both() -> None:
            await asyncio.gather(_load(server.address, concurrency, end, outcomes), _sample(server, end, samples))

        asyncio.run(both())
        time.sleep(1.0)
        with Client(server.address) as client:
            load = client.load()
    rate = len(outcomes) / (minutes * 60)
    return {
        "minutes": minutes,
        "concurrency": concurrency,
        "requests": len(outcomes),
        "cancelled": sum(outcome.cancelled for outcome in outcomes),
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error}),
        "tokens": sum(len(outcome.tokens) for outcome in outcomes),
        "control_plane_kib_per_request": round(slope_kib_per_request(samples, "control-plane_mib", rate), 4),
        "data_plane_kib_per_request": round(slope_kib_per_request(samples, "data-plane_mib", rate), 4),
        "middle": samples[len(samples) // 2],
        "end": samples[-1],
        "blocks_used_at_the_end": load.used_kv_blocks,
        "running_at_the_end": load.running_requests + load.waiting_requests,
        "leftovers": server.leftovers(),
    }
