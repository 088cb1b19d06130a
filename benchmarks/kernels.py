"""The native CPU kernels against the limits of this machine, measured in the same run.

``run()`` returns the limits, and one line per kernel and shape: what it achieved, the ceiling it is held against, the share of it, and
the share aimed at. Ceilings, all with the same threads:

- one row of activations, decodes of attention: the rate at which this machine reads memory, of a working set as large as theirs
- a decode step of one sequence, all layers and the head: the same, of as many bytes as its weights have
- float32 linears of many rows: the best that torch reaches in this run on any of these shapes; beside it, torch on the same shape
- linears with int8 activations and many rows: the same linear in floats
- prompt chunks of attention: the rate of fused multiply-adds in registers
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from twinplane.data_plane.kv_cache import KV_DTYPES, kv_dtype_name
from twinplane.kernels import _cpu
from twinplane.kernels.cpu import ops
from twinplane.kernels.decoder import Decoder, DecoderLayer, DecoderStep

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # (out, in) of SmolLM2-135M's layer: qkv, output, gate and up, down
_COLD_BYTES = 512 << 20  # weights cycled through for one row: more than a decode finds in caches that are its own
_WARM_BYTES = 48 << 20  # for many rows, where arithmetic is the limit
_ROWS = (8, 16, 32, 64, 512)
_FORMATS: tuple[tuple[str, ops.Activations], ...] = (
    ("float32", "float"),
    ("bfloat16", "float"),
    ("Q8_0", "float"),
    ("Q8_0", "int8"),
    ("Q4_1", "float"),
    ("Q4_1", "int8"),
)
_DECODE_GOAL, _GEMM_GOAL, _SKINNY_GOAL, _INT8_GOAL, _ATTENTION_GOAL = 0.75, 0.8, 1.5, 2.0, 1 / 1.3


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


def _packed(kind: str, activations: ops.Activations, weight: torch.Tensor) -> _cpu.PackedLinear:
    if kind in ("float32", "bfloat16"):
        return ops.pack_linear(weight.to(getattr(torch, kind)))
    return ops.quantize_linear(weight, kind, None, activations)  # type: ignore[arg-type]


def _linears(kind: str, activations: ops.Activations, out_features: int, in_features: int, num_bytes: int) -> list[_cpu.PackedLinear]:
    """As many as exceed `num_bytes`, each with weights of its own."""
    weight = torch.randn(out_features, in_features)
    first = _packed(kind, activations, weight)
    return [first, *(_packed(kind, activations, weight) for _ in range(max(1, num_bytes // first.nbytes)))]


def _shape(rows: int, out_features: int, in_features: int) -> str:
    return f"{rows}x{in_features} @ {in_features}x{out_features}"


def _gflops(linears: list[_cpu.PackedLinear], rows: int, repeats: int) -> float:
    x, out = torch.randn(rows, linears[0].in_features), torch.empty(rows, linears[0].out_features)

    def work() -> None:
        for linear in linears:
            linear(x, out)

    seconds = _seconds(work, repeats)
    return 2e-9 * rows * linears[0].out_features * linears[0].in_features * len(linears) / seconds


def bench_decode(bandwidth: float, repeats: int, cold_bytes: int) -> list[Line]:
    """One row: bytes of weights per second."""
    lines = []
    for kind, activations in _FORMATS:
        for out_features, in_features in SHAPES:
            linears = _linears(kind, activations, out_features, in_features, cold_bytes)
            x, out = torch.randn(1, in_features), torch.empty(1, out_features)
            seconds = _seconds(lambda x=x, out=out, linears=linears: [linear(x, out) for linear in linears], repeats)  # type: ignore[misc]
            rate = sum(linear.nbytes for linear in linears) / seconds / 1e9
            lines.append(_line(_name(kind, activations), _shape(1, out_features, in_features), rate, bandwidth, "GB/s", _DECODE_GOAL))
    return lines


def bench_step(repeats: int, cold_bytes: int) -> list[Line]:
    """One sequence's step at a context of 128 on a model of SmolLM2-135M's shapes: bytes of weights per second."""
    heads, kv_heads, dim, hidden, context, block = 9, 3, 64, 576, 128, 32
    num_layers, vocabulary = (30, 49152) if cold_bytes >= _COLD_BYTES else (1, 1024)
    norm = torch.ones(hidden)
    lines = []
    for kind, activations in _FORMATS:
        layers, num_bytes = [], 0
        for _ in range(num_layers):
            parts = [_packed(kind, activations, torch.randn(shape)) for shape in SHAPES]
            qkv, output, gate_up, down = parts
            layers.append(DecoderLayer(norm, qkv, None, None, output, norm, gate_up, down, window=0))
            num_bytes += sum(part.nbytes for part in parts)
        head = _packed(kind, activations, torch.randn(vocabulary, hidden))
        num_bytes += head.nbytes
        model = Decoder(head, layers, norm, head)
        dtype = torch.float32 if activations == "float" else torch.bfloat16  # the default beside each
        caches = [ops.allocate_kv(context // block, kv_heads, block, dim, dim, dtype, "cpu") for _ in layers]
        for cache in (cache for pair in caches for cache in pair):
            cache.zero_()
        step = DecoderStep(
            num_heads=heads,
            num_kv_heads=kv_heads,
            scale=dim**-0.5,
            eps=1e-5,
            cos=torch.ones(context, dim // 2),
            sin=torch.zeros(context, dim // 2),
            positions=torch.tensor([context - 1]),
            slots=torch.tensor([context - 1]),
            block_tables=torch.arange(context // block, dtype=torch.int32).view(1, -1),
            context_lens=torch.tensor([context], dtype=torch.int32),
            query_start=torch.tensor([0, 1], dtype=torch.int32),
        )
        keys, values = [pair[0] for pair in caches], [pair[1] for pair in caches]
        arguments = (model, torch.tensor([7]), step, torch.tensor([0]), keys, values)
        seconds = _seconds(lambda arguments=arguments: ops.decoder_logits(*arguments), 5 * repeats)  # type: ignore[misc]
        ceiling = _cpu.measure_read_bandwidth(max(1, num_bytes >> 20))
        name = f"decode step {_name(kind, activations).removeprefix('linear ')}"
        lines.append(_line(name, f"1 row, {num_bytes / 1e6:.0f} MB", num_bytes / seconds / 1e9, ceiling, "GB/s", _DECODE_GOAL))
    return lines


def _name(kind: str, activations: str) -> str:
    return f"linear {kind}" if activations == "float" else f"linear {kind} int8"


def _torch_gflops(out_features: int, in_features: int, rows: int, repeats: int, num_bytes: int) -> float:
    weights = [torch.randn(out_features, in_features) for _ in range(max(2, num_bytes // (4 * out_features * in_features)))]
    x = torch.randn(rows, in_features)
    torch.set_num_threads(_cpu.threads())
    seconds = _seconds(lambda: [torch.nn.functional.linear(x, weight) for weight in weights], repeats)
    torch.set_num_threads(1)
    return 2e-9 * rows * out_features * in_features * len(weights) / seconds


def bench_gemm(repeats: int, warm_bytes: int) -> tuple[list[Line], float]:
    """Many rows: operations per second. Also returns torch's best."""
    rates: dict[tuple[str, str, int, tuple[int, int]], float] = {}
    torch_rates: dict[tuple[int, tuple[int, int]], float] = {}
    for shape in SHAPES:
        for kind, activations in _FORMATS:
            linears = _linears(kind, activations, *shape, warm_bytes)
            for rows in _ROWS:
                rates[kind, activations, rows, shape] = _gflops(linears, rows, repeats)
        for rows in _ROWS:
            torch_rates[rows, shape] = _torch_gflops(*shape, rows, repeats, warm_bytes)
    best = max(torch_rates.values())
    lines = []
    for (kind, mode, rows, shape), rate in rates.items():
        text = _shape(rows, *shape)
        if mode == "int8":
            goal = _INT8_GOAL if rows == 16 else 1.0
            lines.append(_line(f"{_name(kind, mode)} / floats", text, rate, rates[kind, "float", rows, shape], "GFLOP/s", goal))
        elif rows >= 64:
            lines.append(_line(_name(kind, mode), text, rate, best, "GFLOP/s", _GEMM_GOAL))
        if kind == "float32":
            goal = _SKINNY_GOAL if rows <= 32 else 1.0
            lines.append(_line("linear float32 / torch", text, rate, torch_rates[rows, shape], "GFLOP/s", goal))
    return lines, best


def bench_attention(dtype: torch.dtype, bandwidth: float, fma: float, repeats: int) -> list[Line]:
    """Decodes (bytes of KV per second) and a prompt chunk (operations per second), 9 query heads on 3 KV heads of 64."""
    heads, kv_heads, dim, block = 9, 3, 64, 16
    lines = []
    for sequences, context, new in ((1, 4096, 1), (16, 128, 1), (16, 1024, 1), (16, 4096, 1), (1, 512, 512), (1, 4096, 256)):
        blocks = context // block
        k_cache, v_cache = ops.allocate_kv(sequences * blocks, kv_heads, block, dim, dim, dtype, "cpu")
        slots = torch.arange(sequences * context)
        ops.write_kv(torch.randn(len(slots), kv_heads, dim), torch.randn(len(slots), kv_heads, dim), k_cache, v_cache, slots)
        tables = torch.randperm(sequences * blocks).to(torch.int32).view(sequences, blocks)
        contexts = torch.full((sequences,), context, dtype=torch.int32)
        starts = (torch.arange(sequences + 1) * new).to(torch.int32)
        query = torch.randn(sequences * new, heads, dim)
        arguments = (query, k_cache, v_cache, tables, contexts, starts, dim**-0.5)
        seconds = _seconds(lambda arguments=arguments: ops.paged_attention(*arguments), repeats)  # type: ignore[misc]
        name, shape = f"paged attention {kv_dtype_name(dtype)}", f"{sequences} x {new} queries, context {context}"
        if new == 1:
            bytes_read = k_cache.nbytes + v_cache.nbytes
            lines.append(_line(name, shape, bytes_read / seconds / 1e9, bandwidth, "GB/s", _ATTENTION_GOAL if context == 4096 else 0.5))
        else:
            seen = new * (context - new) + new * (new + 1) // 2
            lines.append(_line(name, shape, 4e-9 * seen * heads * dim / seconds, fma, "GFLOP/s", 0.5))
    return lines


def run(repeats: int = 3, cold_bytes: int = _COLD_BYTES, warm_bytes: int = _WARM_BYTES) -> dict[str, Any]:
    """``kernels``: a dict for each kernel and shape with the keys kernel, shape, achieved, ceiling, unit, share, goal; beside it the
    limits of the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bandwidth, fma = _cpu.measure_read_bandwidth(max(1, cold_bytes >> 20)), _cpu.measure_fma_rate()
        lines = bench_step(repeats, cold_bytes)
        lines += bench_decode(bandwidth, repeats, cold_bytes)
        products, torch_best = bench_gemm(repeats, warm_bytes)
        lines += products
        for dtype in KV_DTYPES.values():
            lines += bench_attention(dtype, bandwidth, fma, repeats)
    finally:
        torch.set_num_threads(before)
    limits = {"read_gb_per_s": round(bandwidth, 1), "fma_gflops": round(fma, 1), "torch_best_gflops": round(torch_best, 1)}
    return {"isa": _cpu.isa(), "threads": _cpu.threads(), **limits, "kernels": [asdict(line) for line in lines]}
