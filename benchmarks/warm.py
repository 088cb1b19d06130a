"""What the prefix cache saves: time to first token behind a long system prompt, cold and with it cached.

A server on the demo model, measured by a client over gRPC, one request after the other. Each round has a system prompt of its own, asks
once cold, then with other tails (workload W4 of the performance document).
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

from .load import Request, closed_loop, percentile
from .server import Server, demo_model

_VOCAB = 49152


def run(system_tokens: int = 2000, tail_tokens: int = 32, warm: int = 16, rounds: int = 3) -> dict[str, object]:
    """Medians of ``rounds`` cold and ``rounds * warm`` warm requests, and the prompt tokens of a warm one that were cached."""
    draw = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, _VOCAB) for _ in range(count))

    requests = []
    for _ in range(rounds):
        system = tokens(system_tokens)
        requests += [Request(system + tokens(tail_tokens), 4) for _ in range(1 + warm)]
    with tempfile.TemporaryDirectory() as folder, Server(demo_model(), log=Path(folder) / "server.log") as server:
        outcomes, _ = asyncio.run(closed_loop(server.address, requests, 1))
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed, the first: {errors[0]}")
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
