"""The native CPU kernels against the limits of this machine, measured in the same run.

``run()`` returns one line per kernel and shape: what it achieved, the ceiling it is held against (memory bandwidth or the rate of fused
multiply-adds, both measured here with the same threads), the share of it, and the share aimed at. Linears are also
compared with torch's own (fp32, the same number of threads), ceiling then being torch's rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from twinplane.kernels import _cpu
from twinplane.kernels.cpu import ops

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # (out, in) of SmolLM2-135M's layer: qkv, output, gate and up, down
_COLD_BYTES = 48 << 20  # weights cycled through, so that none stays in a core's own caches
_ROWS = (1, 8, 16, 32, 64, 512)


@dataclass(frozen=True)
class Line:
    kernel: str
    shape: str
    achieved: float
    ceiling: float
    unit: str
    share: float
    goal: float


def _line(kernel: str, shape: str, achieved: float, ceiling: float, unit: str, goal: float) -> Line:
    return Line(kernel, shape, round(achieved, 1), round(ceiling, 1), unit, round(achieved / ceiling, 3), goal)


def _seconds(work: Callable[[], object], repeats: int) -> float:
    """Best of `repeats`, after one run to warm up."""
    work()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _linears(kind: str, out_features: int, in_features: int, cold_bytes: int) -> list[_cpu.PackedLinear]:
    """As many copies as exceed the caches."""
    weight = torch.randn(out_features, in_features)

    def one() -> _cpu.PackedLinear:
        if kind in ("float32", "bfloat16"):
            return ops.pack_linear(weight.to(getattr(torch, kind)))
        return ops.quantize_linear(weight, kind)  # type: ignore[arg-type]

    first = one()
    return [first, *(one() for _ in range(max(1, cold_bytes // first.nbytes)))]


def bench_linear(kind: str, bandwidth: float, fma: float, repeats: int, cold_bytes: int) -> list[Line]:
    """One row: bytes of weights per second. Many rows: operations per second."""
    lines = []
    for out_features, in_features in SHAPES:
        linears = _linears(kind, out_features, in_features, cold_bytes)
        for rows in _ROWS:
            x, out = torch.randn(rows, in_features), torch.empty(rows, out_features)
            seconds = _seconds(lambda x=x, out=out, linears=linears: [linear(x, out) for linear in linears], repeats) / len(linears)  # type: ignore[misc]
            shape = f"{rows}x{in_features} @ {in_features}x{out_features}"
            if rows == 1:
                lines.append(_line(f"linear {kind}", shape, linears[0].nbytes / seconds / 1e9, bandwidth, "GB/s", 0.75))
            else:
                rate = 2 * rows * out_features * in_features / seconds / 1e9
                lines.append(_line(f"linear {kind}", shape, rate, fma, "GFLOP/s", 0.6 if rows >= 64 else 0.3))
    return lines


def bench_against_torch(repeats: int, cold_bytes: int) -> list[Line]:
    """fp32 linear, ours as a share of torch's on the same threads."""
    lines = []
    for out_features, in_features in SHAPES:
        linears = _linears("float32", out_features, in_features, cold_bytes)
        weights = [torch.randn(out_features, in_features) for _ in linears]
        for rows in _ROWS:
            x, out = torch.randn(rows, in_features), torch.empty(rows, out_features)
            ours = _seconds(lambda x=x, out=out, linears=linears: [linear(x, out) for linear in linears], repeats)  # type: ignore[misc]
            torch.set_num_threads(_cpu.threads())
            theirs = _seconds(lambda x=x, weights=weights: [torch.nn.functional.linear(x, w) for w in weights], repeats)  # type: ignore[misc]
            torch.set_num_threads(1)
            flop = 2e-9 * rows * out_features * in_features * len(linears)
            goal = 1.5 if 8 <= rows <= 32 else 1.0
            shape = f"{rows}x{in_features} @ {in_features}x{out_features}"
            lines.append(_line("linear float32 / torch", shape, flop / ours, flop / theirs, "GFLOP/s", goal))
    return lines


def bench_attention(dtype: torch.dtype, bandwidth: float, fma: float, repeats: int) -> list[Line]:
    """Decodes (bytes of KV per second) and a prompt chunk (operations per second), 9 query heads on 3 KV heads of 64."""
    heads, kv_heads, dim, block = 9, 3, 64, 16
    lines = []
    for sequences, context, new in ((1, 4096, 1), (16, 128, 1), (16, 1024, 1), (16, 4096, 1), (1, 512, 512), (1, 4096, 256)):
        blocks = context // block
        k_cache, v_cache = ops.allocate_kv(sequences * blocks, kv_heads, block, dim, dim, dtype, "cpu")
        k_cache.normal_()
        v_cache.normal_()
        tables = torch.randperm(sequences * blocks).to(torch.int32).view(sequences, blocks)
        contexts = torch.full((sequences,), context, dtype=torch.int32)
        starts = (torch.arange(sequences + 1) * new).to(torch.int32)
        query = torch.randn(sequences * new, heads, dim)
        arguments = (query, k_cache, v_cache, tables, contexts, starts, dim**-0.5)
        seconds = _seconds(lambda arguments=arguments: ops.paged_attention(*arguments), repeats)  # type: ignore[misc]
        name, shape = f"paged attention {str(dtype).removeprefix('torch.')}", f"{sequences} x {new} queries, context {context}"
        if new == 1:
            bytes_read = 2 * k_cache.numel() * k_cache.element_size()
            lines.append(_line(name, shape, bytes_read / seconds / 1e9, bandwidth, "GB/s", 0.6))
        else:
            seen = new * (context - new) + new * (new + 1) // 2
            lines.append(_line(name, shape, 4e-9 * seen * heads * dim / seconds, fma, "GFLOP/s", 0.5))
    return lines


def run(repeats: int = 3, cold_bytes: int = _COLD_BYTES) -> dict[str, Any]:
    """``kernels``: a dict for each kernel and shape with the keys kernel, shape, achieved, ceiling, unit, share, goal."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bandwidth, fma = _cpu.measure_read_bandwidth(), _cpu.measure_fma_rate()
        lines = [
            line for kind in ("float32", "bfloat16", "Q8_0", "Q4_1") for line in bench_linear(kind, bandwidth, fma, repeats, cold_bytes)
        ]
        lines += bench_against_torch(repeats, cold_bytes)
        for dtype in (torch.float32, torch.bfloat16):
            lines += bench_attention(dtype, bandwidth, fma, repeats)
    finally:
        torch.set_num_threads(before)
    return {"isa": _cpu.isa(), "threads": _cpu.threads(), "kernels": [asdict(line) for line in lines]}
