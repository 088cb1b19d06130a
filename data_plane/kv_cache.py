"""The paged KV cache: one K and one V tensor per layer, cut into blocks. Its physical layout belongs to the kernels.

Every layer has the same blocks: block b of the block table is block b of each layer's K and V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from twinplane.kernels.registry import Ops

# --kv-cache-dtype. Values of one byte have a power of two beside each head of a token, another byte (kernels/cpu/kernels.hpp, KvType).
KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def kv_dtype_name(dtype: torch.dtype) -> str:
    """As the option ``kv_cache_dtype`` says it."""
    return next(name for name, each in KV_DTYPES.items() if each == dtype)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer caches per token: num_kv_heads keys of head_dim and values of v_head_dim."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        powers = 2 * self.num_kv_heads if dtype.itemsize == 1 else 0
        return self.elements_per_token * dtype.itemsize + powers


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of a model's cache, known before anything is allocated."""

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token(self.dtype) for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


def choose_block_size(head_dim: int, dtype: torch.dtype) -> int:
    """16, 32 or 64 tokens: larger for larger heads, where a block table of small blocks costs more than its waste saves;
    doubled for one-byte KV, so that a row of a block stays a full cache line; at least 32 for two-byte KV, of which the matrix unit
    multiplies 32 tokens at a time."""
    size = 16 if head_dim <= 64 else 32 if head_dim <= 128 else 64
    return {1: min(64, size * 2), 2: max(32, size)}.get(dtype.itemsize, size)


class KVCache:
    """Allocated blocks of all layers. Block contents are undefined until written."""

    def __init__(self, spec: KVSpec, num_blocks: int, ops: Ops, device: str) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self._ops = ops
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        for layer in spec.layers:
            k, v = ops.allocate_kv(num_blocks, layer.num_kv_heads, spec.block_size, layer.head_dim, layer.v_head_dim, spec.dtype, device)
            self.k.append(k)
            self.v.append(v)

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks in every layer. sources, targets [n] int64; all sources are read before a target is written."""
        self._ops.copy_blocks([*self.k, *self.v], sources, targets)

    def copy_to(self, other: KVCache, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks of every layer into another cache of the same spec (a swap). sources, targets [n] int64."""
        for mine, theirs in zip([*self.k, *self.v], [*other.k, *other.v], strict=True):
            theirs.index_copy_(0, targets, mine.index_select(0, sources))
