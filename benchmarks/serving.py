"""Throughput at a concurrency, beside transformers' continuous batching on the same weights in the same run.

``twinplane bench serving rounds=3`` alternates the two (A B A B ...), because a shared machine drifts; each sees the
same requests. Twinplane is measured as a client sees it: over gRPC, through both planes.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .load import Request, closed_loop, lognormal_requests, summary
from .server import Server, demo_model
from .workloads import VOCAB_SIZE


class Transformers:
    """The peer: ``generate_batch`` of transformers (continuous batching, paged attention) in fp32."""

    def __init__(self) -> None:
        import torch
        from twinplane.benchmarks import reference_model

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._model = reference_model.load(demo_model())
        self._model.set_attn_implementation("sdpa")

    def run(self, requests: Sequence[Request], concurrency: int) -> float:
        """Output tokens per second. All requests have one output length here: the peer takes one for the whole batch."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        generation = GenerationConfig(max_new_tokens=requests[0].max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=2)
        batching = ContinuousBatchingConfig(max_batch_tokens=512, num_blocks=64, max_requests_per_batch=concurrency)
        start = time.perf_counter()
        outputs = self._model.generate_batch(
            inputs=[list(request.prompt) for request in requests], generation_config=generation, continuous_batching_config=batching
        )
        return float(sum(len(output.generated_tokens) for output in outputs.values()) / (time.perf_counter() - start))


def run(rounds: int = 3, requests: int = 32, concurrency: int = 16, new_tokens: int = 64, options: Sequence[str] = ()) -> dict[str, object]:
    """Medians over ``rounds`` alternating rounds, and the ratio of each round."""
    load = [Request(r.prompt, new_tokens) for r in lognormal_requests(requests, vocab_size=VOCAB_SIZE)]
    peer = Transformers()
    ours: list[dict[str, float]] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(rounds + 1):
            with Server(demo_model(), "--kv-cache-bytes", "1GiB", *options, log=Path(folder) / "server.log") as server:
                outcomes, wall = asyncio.run(closed_loop(server.address, load, concurrency))
            scheduler = next(event for event in server.log_events() if event["event"] == "scheduler")
            server.log.unlink()
            measured = peer.run(load, concurrency)
            if index > 0:  # the first round warms both up
                ours.append({**summary(outcomes, wall), **{name: float(str(scheduler[name])) for name in ("tick_us", "host_gap_us")}})
                theirs.append(measured)
    rates = [figures["output_tokens_per_s"] for figures in ours]
    return {
        "requests": requests,
        "concurrency": concurrency,
        "new_tokens": new_tokens,
        "twinplane_tokens_per_s": statistics.median(rates),
        "transformers_tokens_per_s": round(statistics.median(theirs), 2),
        "ratio": round(statistics.median(a / b for a, b in zip(rates, theirs, strict=True)), 3),
        "ratios": [round(a / b, 3) for a, b in zip(rates, theirs, strict=True)],
        "twinplane": ours,
    }
