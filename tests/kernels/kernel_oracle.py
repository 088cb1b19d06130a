"""Random paged batches and comparisons shared by the kernel tests, whatever implementation they test."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedBatch:
    """A mixed batch of decodes and chunks over scattered blocks, with the contiguous truth beside it.

    `keys[i]`, `values[i]`: [context_i, G, D], all tokens of sequence i, in order. The first
    ``context_i - new_i`` of them are meant to lie in the cache, the last ``new_i`` are this step's.
    """

    keys: list[Tensor]
    values: list[Tensor]
    query: Tensor  # [T, H, D]
    block_tables: Tensor  # [S, M] int32
    context_lens: Tensor  # [S] int32
    query_start: Tensor  # [S + 1] int32
    block_size: int
    num_blocks: int

    def slots(self, sequence: int, begin: int, end: int) -> Tensor:
        """Slots of tokens begin .. end-1 of a sequence, [end - begin] int64."""
        token = torch.arange(begin, end)
        return self.block_tables[sequence, token // self.block_size].long() * self.block_size + token % self.block_size

    def all_slots(self) -> Tensor:
        return torch.cat([self.slots(i, 0, len(keys)) for i, keys in enumerate(self.keys)])


def paged_batch(
    contexts: list[int],
    new: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> PagedBatch:
    """Random sequences of `contexts` tokens, the last `new` of which are queries, in blocks of random order."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    needed = [-(-context // block_size) for context in contexts]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    tables = torch.full((len(contexts), max(needed) + 1), num_blocks + 1000, dtype=torch.int32)  # beyond the context: never read
    taken = 0
    for i, count in enumerate(needed):
        tables[i, :count] = order[taken : taken + count]
        taken += count
    return PagedBatch(
        keys=[normal(context, kv_heads, head_dim) for context in contexts],
        values=[normal(context, kv_heads, head_dim) for context in contexts],
        query=normal(sum(new), heads, head_dim),
        block_tables=tables,
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        query_start=torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32),
        block_size=block_size,
        num_blocks=num_blocks,
    )


def dense_attention(batch: PagedBatch, scale: float, sliding_window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
    """Attention from the contiguous keys and values, one (query, head) at a time, in float64: [T, H, D]."""
    rows = []
    starts = batch.query_start.tolist()
    for i, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        group = batch.query.shape[1] // keys.shape[1]
        for row in range(starts[i], starts[i + 1]):
            position = len(keys) - (starts[i + 1] - row)
            first = max(0, position - sliding_window + 1) if sliding_window else 0
            heads = []
            for head in range(batch.query.shape[1]):
                k, v = keys[first : position + 1, head // group].double(), values[first : position + 1, head // group].double()
                score = k @ batch.query[row, head].double() * scale
                score = softcap * torch.tanh(score / softcap) if softcap else score
                weight = score.exp()
                extra = sinks[head].double().exp() if sinks is not None else 0.0
                heads.append((weight[:, None] * v).sum(0) / (weight.sum() + extra))
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def filled_cache(ops: object, batch: PagedBatch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A cache of `ops`' own layout that holds every key and value of the batch."""
    kv_heads, head_dim = batch.keys[0].shape[1:]
    k_cache, v_cache = ops.allocate_kv(batch.num_blocks, kv_heads, batch.block_size, head_dim, head_dim, dtype, "cpu")  # type: ignore[attr-defined]
    ops.write_kv(torch.cat(batch.keys), torch.cat(batch.values), k_cache, v_cache, batch.all_slots())  # type: ignore[attr-defined]
    return k_cache, v_cache
