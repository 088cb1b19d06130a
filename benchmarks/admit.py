"""What the tick costs that admits a crowd of waiting prompts, with nothing in the prefix cache.

The timed loop is native (``control_plane/core/bench/admit_bench.cpp``) and runs the production scheduler.
"""

from __future__ import annotations

from typing import Any

from .native import measure


def run(requests: int = 64, tokens: int = 1000, *, rounds: int = 500, block_size: int = 16) -> dict[str, Any]:
    """Time, in each of `rounds`, the tick that makes `requests` waiting prompts of `tokens` tokens resident.

    Returns ``p50_us``, ``p99_us``, ``max_us``.
    """
    return measure("admit_bench", requests, tokens, rounds, block_size)
