"""The native CPU kernels in the form of `kernels/reference.py`: same names, signatures and meaning, torch tensors in and out.

Hidden states are float32. Weights are stored as float32, bfloat16 or in GGUF's blocks of 8 to 4 bits, the cache as float32,
bfloat16 or FP8. Arithmetic is float32, except for weights packed with ``activations="int8"``, which meet x as integers. Another
floating dtype of an argument (a bfloat16 model of the fallback) is converted here, and the result back.

Unlike the reference, each output row is bit-identical whatever the batch around it (INV-10).
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from twinplane.kernels import _cpu
from twinplane.kernels._cpu import PackedLinear
from twinplane.kernels.decoder import Decoder, DecoderLayer, DecoderStep

__all__ = [
    "add_rms_norm",
    "allocate_kv",
    "argmax",
    "concat_linears",
    "copy_blocks",
    "decoder_layers",
    "decoder_logits",
    "gather",
    "gelu_mul",
    "layer_norm",
    "linear",
    "linear_rope_write_kv",
    "linear_silu_mul",
    "pack_gguf",
    "pack_linear",
    "paged_attention",
    "quantize_linear",
    "rms_norm",
    "rope",
    "rope_write_kv",
    "sample",
    "silu_mul",
    "uniforms",
    "write_kv",
]

QuantizedKind = Literal["Q8_0", "Q4_0", "Q4_1"]
GGUFKind = Literal["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
Activations = Literal["float", "int8"]


def _float(x: Tensor) -> Tensor:
    """float32 with contiguous rows; `x` itself where it is that already."""
    x = x if x.dtype == torch.float32 else x.float()
    return x if x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _contiguous_float(x: Tensor) -> Tensor:
    return _float(x).contiguous()


# ---------------------------------------------------------------------------------------------- norms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See reference.rms_norm. x [..., dim]."""
    rows = _float(x).reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape)
    _cpu.rms_norm(rows, _contiguous_float(weight), eps, out)
    return out.view(x.shape).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See reference.add_rms_norm; `residual` is updated in place."""
    out = torch.empty(x.shape)
    total = _float(residual)
    _cpu.add_rms_norm(_float(x), total, _contiguous_float(weight), eps, out)
    return out.to(x.dtype), total.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim. x [..., dim] -> [..., dim]."""
    rows = _float(x).reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape)
    _cpu.layer_norm(rows, _contiguous_float(weight), _contiguous_float(bias), eps, out)
    return out.view(x.shape).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See reference.rope."""
    out = torch.empty(x.shape)
    _cpu.rope(_contiguous_float(x), _float(cos), _float(sin), out)
    return out.to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See reference.silu_mul."""
    return _gated(gate_up, "silu")


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See reference.gelu_mul."""
    return _gated(gate_up, "gelu_tanh")


def _gated(gate_up: Tensor, activation: _cpu.Activation) -> Tensor:
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _cpu.gated(_float(gate_up), out, activation)
    return out.to(gate_up.dtype)


# ---------------------------------------------------------------------------------------------- linear


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """See reference.pack_linear. bfloat16 weights stay bfloat16 in memory, all others become float32."""
    stored = weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()
    return PackedLinear(stored.contiguous(), None if bias is None else _contiguous_float(bias))


def pack_gguf(blocks: Tensor, kind: GGUFKind, bias: Tensor | None = None, activations: Activations = "float") -> PackedLinear:
    """See reference.pack_gguf. With float activations it computes exactly what the dequantized weight would."""
    return PackedLinear.from_gguf(blocks.contiguous(), kind, None if bias is None else _contiguous_float(bias), activations)


def quantize_linear(weight: Tensor, kind: QuantizedKind, bias: Tensor | None = None, activations: Activations = "float") -> PackedLinear:
    """See reference.quantize_linear."""
    return PackedLinear.quantize(_contiguous_float(weight), kind, None if bias is None else _contiguous_float(bias), activations)


def concat_linears(parts: list[PackedLinear]) -> PackedLinear:
    """See reference.concat_linears. Packed weights are shared, not copied."""
    return PackedLinear.concat(parts)


def linear(x: Tensor, packed: PackedLinear, residual: Tensor | None = None) -> Tensor:
    """See reference.linear."""
    out = torch.empty(x.shape[0], packed.out_features)
    packed(_float(x), out, None if residual is None else _float(residual))
    return out.to(x.dtype)


def gather(packed: PackedLinear, ids: Tensor) -> Tensor:
    """See reference.gather."""
    out = torch.empty(ids.shape[0], packed.in_features)
    packed.gather(ids, out)
    return out


def linear_silu_mul(x: Tensor, packed: PackedLinear) -> Tensor:
    """See reference.linear_silu_mul."""
    out = torch.empty(x.shape[0], packed.out_features // 2)
    _cpu.linear_gated(_float(x), packed, out, "silu")
    return out.to(x.dtype)


# ------------------------------------------------------------------------------------------ paged cache

KEY_TILE = 16  # keys that lie side by side, dim by dim: one vector of the kernels


def allocate_kv(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """K [N, G, B/16, D, 16], V [N, G, B, Dv], zeroed. Raises ValueError for a block size or dtype the kernels do not have.

    bfloat16 and float8_e4m3fn: K {[D/2, 16, 2], [D%2, 16]} and V [B/2, Dv, 2] in that memory (KvType in kernels.hpp).
    float8_e4m3fn: with a power of two beside each head of a token, as bytes; K [N, G, B/16, D + 1, 16], V [N, G, B (Dv + 1)] uint8.
    """
    if block_size % KEY_TILE:
        raise ValueError(f"block_size is {block_size}; the CPU kernels need a multiple of {KEY_TILE}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        raise ValueError(f"dtype is {dtype}; the CPU kernels keep KV as torch.float32, torch.bfloat16 or torch.float8_e4m3fn")
    tiles, powers = block_size // KEY_TILE, int(dtype == torch.float8_e4m3fn)
    values = (block_size * (v_head_dim + 1),) if powers else (block_size, v_head_dim)
    stored = torch.uint8 if powers else dtype
    k_cache = _zeros((num_blocks, num_kv_heads, tiles, head_dim + powers, KEY_TILE), stored)
    v_cache = _zeros((num_blocks, num_kv_heads, *values), stored)
    return k_cache, v_cache


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in a mapping of their own, of huge pages where there are any: memory comes when it is written to, or by `_cpu.populate`."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _head_dim(k_cache: Tensor) -> int:
    return k_cache.shape[3] - (k_cache.dtype == torch.uint8)


def _value_dim(k_cache: Tensor, v_cache: Tensor) -> int:
    return v_cache.shape[2] // (k_cache.shape[2] * KEY_TILE) - 1 if v_cache.dtype == torch.uint8 else v_cache.shape[3]


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See reference.write_kv."""
    _cpu.write_kv(_contiguous_float(key), _contiguous_float(value), k_cache, v_cache, slots)


def rope_write_kv(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See reference.rope_write_kv."""
    query = torch.empty(qkv.shape[0], num_heads, _head_dim(k_cache))
    norms = (None if q_norm is None else _contiguous_float(q_norm), None if k_norm is None else _contiguous_float(k_norm))
    _cpu.rope_write_kv(_float(qkv), num_heads, num_kv_heads, _float(cos), _float(sin), k_cache, v_cache, slots, query, *norms, eps)
    return query.to(qkv.dtype)


def linear_rope_write_kv(
    x: Tensor,
    packed: PackedLinear,
    num_heads: int,
    num_kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """``rope_write_kv(linear(x, packed), ...)`` in one call. x [T, K] float32 -> query [T, H, D]."""
    query = torch.empty(x.shape[0], num_heads, _head_dim(k_cache))
    _cpu.linear_rope_write_kv(x, packed, num_heads, num_kv_heads, cos, sin, k_cache, v_cache, slots, query, q_norm, k_norm, eps)
    return query


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """See reference.paged_attention."""
    out = torch.empty(query.shape[0], query.shape[1], _value_dim(k_cache, v_cache))
    wide_sinks = None if sinks is None else _contiguous_float(sinks)
    _cpu.paged_attention(
        _contiguous_float(query), k_cache, v_cache, block_tables, context_lens, query_start, out, scale, sliding_window, softcap, wide_sinks
    )
    return out.to(query.dtype)


def copy_blocks(caches: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    """See reference.copy_blocks."""
    _cpu.copy_blocks(caches, sources, targets)


# ------------------------------------------------------------------------------------- layers and models


def decoder_layers(
    residual: Tensor, layers: Sequence[DecoderLayer], step: DecoderStep, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor]
) -> Tensor:
    """See decoder.decoder_layers; the same values to the bit. `residual` float32 is updated in place."""
    _cpu.decoder_layers(residual, layers, step, k_caches, v_caches)
    return residual


def decoder_logits(
    decoder: Decoder,
    token_ids: Tensor,
    step: DecoderStep,
    sample_tokens: Tensor,
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
) -> Tensor:
    """See decoder.decoder_logits; the same values to the bit."""
    out = torch.empty(sample_tokens.shape[0], decoder.head.out_features)
    _cpu.decoder_logits(decoder, token_ids, step, sample_tokens, k_caches, v_caches, out)
    return out


# --------------------------------------------------------------------------------------------- sampling


def argmax(logits: Tensor) -> Tensor:
    """See reference.argmax."""
    out = torch.empty(logits.shape[0], dtype=torch.int32)
    _cpu.argmax(_float(logits), out)
    return out


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    """See reference.sample."""
    out = torch.empty(logits.shape[0], dtype=torch.int32)
    _cpu.sample(_float(logits), temperature, top_k, top_p, min_p, uniforms, out)
    return out


def uniforms(seeds: Tensor, streams: Tensor, positions: Tensor) -> Tensor:
    """See reference.uniforms."""
    out = torch.empty(seeds.shape[0], dtype=torch.float32)
    _cpu.uniforms(seeds, streams, positions, out)
    return out
