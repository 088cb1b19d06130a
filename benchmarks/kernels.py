"""The kernels a step is made of, in the shapes of a small Llama, beside their torch reference.

A decode step is bound by memory: its linears read every weight, its attention the whole KV cache of its sequences. A
prompt chunk is bound by arithmetic. So the figures are GB/s for the former and GFLOP/s for the latter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from twinplane.kernels.registry import Ops, select

_BLOCK_SIZE = 16


def run(
    hidden: int = 1024, heads: int = 16, kv_heads: int = 4, batch: int = 16, context: int = 512, chunk: int = 256, repeats: int = 20
) -> dict[str, float]:
    """Medians over ``repeats`` runs, float32, for the best kernels of this machine (``fast``) and for the reference.

    Args:
        hidden: features in and out of the linear layer.
        heads, kv_heads: of the attention, with head dimension 64.
        batch: sequences of the decode step, each with ``context`` tokens in the cache.
        chunk: tokens of the prompt chunk.
    """
    figures: dict[str, float] = {}
    torch.manual_seed(0)
    with torch.inference_mode():
        for name, ops in (("fast", select("cpu")), ("reference", select("cpu", "reference"))):
            weight = ops.pack_linear(torch.randn(hidden, hidden))
            decode_s = _median_s(repeats, partial(ops.linear, torch.ones(1, hidden), weight))
            chunk_s = _median_s(repeats, partial(ops.linear, torch.ones(chunk, hidden), weight))
            attention_s = _median_s(repeats, _decode_attention(ops, heads, kv_heads, batch, context))
            figures[f"{name}_linear_decode_gb_per_s"] = hidden * hidden * 4 / decode_s / 1e9
            figures[f"{name}_linear_chunk_gflop_per_s"] = 2 * hidden * hidden * chunk / chunk_s / 1e9
            figures[f"{name}_attention_decode_gb_per_s"] = 2 * batch * context * kv_heads * 64 * 4 / attention_s / 1e9
    return {key: float(f"{value:.3g}") for key, value in figures.items()}


def _decode_attention(ops: Ops, heads: int, kv_heads: int, batch: int, context: int) -> Callable[[], object]:
    """One new token of each of ``batch`` sequences over blocks that lie scattered."""
    blocks_each = -(-context // _BLOCK_SIZE)
    k_cache, v_cache = ops.allocate_kv(batch * blocks_each, kv_heads, _BLOCK_SIZE, 64, 64, torch.float32, "cpu")
    tables = torch.randperm(batch * blocks_each, dtype=torch.int32).view(batch, blocks_each)
    query = torch.randn(batch, heads, 64)
    contexts = torch.full((batch,), context, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    return partial(ops.paged_attention, query, k_cache, v_cache, tables, contexts, starts, 0.125)


def _median_s(repeats: int, work: Callable[[], object]) -> float:
    """Median seconds of one call, after a few to warm up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
