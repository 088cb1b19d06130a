"""Throughput at a concurrency, beside transformers' continuous batching on the same weights in the same run.

``python -m twinplane.benchmarks.serving --rounds 3`` alternates the two (A B A B ...), because a shared machine drifts; each sees the
same requests. Twinplane is measured as a client sees it: over gRPC, through both planes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .load import Request, closed_loop, lognormal_requests, summary
from .server import Server, demo_model

_VOCAB = 49152


class Transformers:
    """The peer: ``generate_batch`` of transformers (continuous batching, paged attention) in fp32."""

    def __init__(self) -> None:
        import torch
        from twinplane.benchmarks import reference_model

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._model = reference_model.load(demo_model())
        self._model.set_attn_implementation("sdpa")

    def run(self, requests: Sequence[Request], concurrency: int) -> dict[str, float]:
        """All requests have one output length here: the peer takes one for the whole batch."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        generation = GenerationConfig(max_new_tokens=requests[0].max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=2)
        batching = ContinuousBatchingConfig(max_batch_tokens=512, num_blocks=64, max_requests_per_batch=concurrency)
        start = time.perf_counter()
        outputs = self._model.generate_batch(
            inputs=[list(request.prompt) for request in requests], generation_config=generation, continuous_batching_config=batching
        )
        wall = time.perf_counter() - start
        return {"output_tokens_per_s": sum(len(output.generated_tokens) for output in outputs.values()) / wall}


def run(rounds: int = 3, requests: int = 32, concurrency: int = 16, new_tokens: int = 64, options: Sequence[str] = ()) -> dict[str, object]:
    """Medians over ``rounds`` alternating rounds, and the ratio of each round."""
    load = [Request(r.prompt, new_tokens) for r in lognormal_requests(requests, vocab_size=_VOCAB)]
    peer = Transformers()
    ours: list[dict[str, float]] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(rounds + 1):
            with Server(demo_model(), "--kv-cache-bytes", "1GiB", *options, log=Path(folder) / "server.log") as server:
                outcomes, wall = asyncio.run(closed_loop(server.address, load, concurrency))
            measured = peer.run(load, concurrency)["output_tokens_per_s"]
            if index > 0:  # the first round warms both up
                ours.append(summary(outcomes, wall))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.rounds, arguments.requests, arguments.concurrency, arguments.new_tokens), indent=2))


if __name__ == "__main__":
    main()
