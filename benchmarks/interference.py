"""What long prompts do to running streams: eight streams of 256 tokens while a 3,000-token prompt arrives every three seconds (W3).

``twinplane bench interference --itl-target-ms 150`` runs a server with that target and measures as a client over gRPC. A target of 0 is the
same load without one. The prompts are an open loop: they arrive whether or not those before are done, so on a slow machine they queue.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import workloads
from .load import connect
from .server import Server, demo_model


def run(
    itl_target_ms: int = 150,
    streams: int = 8,
    stream_tokens: int = 256,
    prompt_tokens: int = 3000,
    period_ms: int = 3000,
    options: Sequence[str] = (),
) -> dict[str, object]:
    """Inter-token latency of the streams, their tokens per second, and the long prompts' time to first token."""

    async def load(address: str) -> workloads.Figures:
        async with connect(address) as generate:
            return await workloads.interference(
                generate, streams=streams, stream_tokens=stream_tokens, prompt_tokens=prompt_tokens, period_s=period_ms / 1e3
            )

    with tempfile.TemporaryDirectory() as folder:
        target = ("--itl-target-ms", str(itl_target_ms), "--kv-cache-bytes", "2GiB")
        with Server(demo_model(), *target, *options, log=Path(folder) / "server.log") as server:
            figures = asyncio.run(load(server.address))
        scheduler = next(event for event in server.log_events() if event["event"] == "scheduler")
    measured = {name: scheduler[name] for name in ("step_margin", "over_itl_target", "tick_us", "host_gap_us")}
    return {"itl_target_ms": itl_target_ms, **figures, **measured}
