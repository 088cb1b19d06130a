"""What the prefix cache saves: time to first token behind a long system prompt, cold and with it cached (workload W4).

A server on the demo model, measured by a client over gRPC, one request after the other.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from .load import connect
from .server import Server, demo_model
from .workloads import Figures, system_prompt


def run(system_tokens: int = 2000, tail_tokens: int = 32, warm: int = 16, rounds: int = 3) -> Figures:
    """Medians of ``rounds`` cold and ``rounds * warm`` warm requests, and the prompt tokens of a warm one that were cached."""

    async def load(address: str) -> Figures:
        async with connect(address) as generate:
            return await system_prompt(generate, system_tokens=system_tokens, tail_tokens=tail_tokens, warm=warm, rounds=rounds)

    with tempfile.TemporaryDirectory() as folder, Server(demo_model(), log=Path(folder) / "server.log") as server:
        return asyncio.run(load(server.address))
