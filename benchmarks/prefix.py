"""What a hit in the prefix cache costs: the exact lookup of a prompt, and its pin (reference and block ids).

The timed loop is native (``control_plane/core/bench/prefix_bench.cpp``) and runs the production tree.
"""

from __future__ import annotations

from typing import Any

from .native import measure


def run(tokens: int = 8000, *, cached_blocks: int = 100_000, rounds: int = 5000, block_size: int = 16) -> dict[str, Any]:
    """Time lookup + pin of prompts of `tokens` tokens, each time another of those that fill `cached_blocks` blocks.

    Returns ``p50_us``, ``p99_us``, ``max_us``, and ``prompts``, how many there are to choose from.
    """
    return measure("prefix_bench", tokens, cached_blocks, rounds, block_size)
