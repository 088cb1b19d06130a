"""KV caches of two bytes and one: what is stored, what attention makes of it, and that it depends on nothing else."""

from __future__ import annotations

import pytest
import torch
from kernel_oracle import PagedBatch, dense_attention, filled_cache, paged_batch
from torch import Tensor
from twinplane.kernels.cpu import ops

NARROW = (torch.bfloat16, torch.float8_e4m3fn)
HEAD_DIMS = (7, 16, 64, 80, 96, 112, 128, 256)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What a cache of `dtype` keeps of heads [..., D], by torch's own conversions, float64."""
    if dtype == torch.bfloat16:
        return x.bfloat16().double()
    greatest = x.double().abs().amax(-1, keepdim=True)
    power = torch.floor(torch.log2(greatest)) - 8
    power = torch.where(greatest > 448 * 2**power, power + 1, power)
    scaled = x.double() / 2**power
    tiny = torch.where(scaled.abs() > 2.0**-7, scaled.sign() * 2.0**-6, 0)  # below 2^-6 there are 0 and 2^-6 only
    return torch.where(scaled.abs() < 2.0**-6, tiny, scaled.to(torch.float8_e4m3fn).double()) * 2**power


def kept(batch: PagedBatch, dtype: torch.dtype) -> PagedBatch:
    """The batch with what the cache keeps of it."""
    from dataclasses import replace

    return replace(batch, keys=[stored(k, dtype) for k in batch.keys], values=[stored(v, dtype) for v in batch.values])


def close_to(isa: str, dtype: torch.dtype) -> dict[str, float]:
    """How close to float64: where pairs of bfloat16 are multiplied, queries and weights of FP8 attention are rounded to it."""
    rounds = dtype == torch.float8_e4m3fn and isa in ("amx", "avx512_bf16")
    return {"rtol": 1e-2, "atol": 1e-2} if rounds else {"rtol": 1e-4, "atol": 2e-5}


def attend(batch: PagedBatch, dtype: torch.dtype, **options: float) -> Tensor:
    k_cache, v_cache = filled_cache(ops, batch, dtype)
    scale = batch.query.shape[2] ** -0.5
    return ops.paged_attention(
        batch.query,
        k_cache,
        v_cache,
        batch.block_tables,
        batch.context_lens,
        batch.query_start,
        scale,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_equals_float64_over_what_the_cache_keeps(isa: str, dtype: torch.dtype, head_dim: int) -> None:
    """Chunks, decodes, contexts that end inside blocks and cross partitions; any head dim."""
    batch = paged_batch([1, 37, 300, 90], [1, 37, 1, 20], head_dim=head_dim, block_size=32, dtype=torch.float32)
    want = dense_attention(kept(batch, dtype), head_dim**-0.5)
    torch.testing.assert_close(attend(batch, dtype).double(), want, **close_to(isa, dtype))


@pytest.mark.parametrize("options", [{"sliding_window": 17}, {"softcap": 5.0}, {"sliding_window": 300, "softcap": 2.0}])
def test_windows_and_softcap_hold_for_fp8(isa: str, options: dict[str, float]) -> None:
    batch = paged_batch([37, 600, 90], [37, 3, 20], head_dim=64, block_size=32, dtype=torch.float32)
    want = dense_attention(kept(batch, torch.float8_e4m3fn), 64**-0.5, **options)  # type: ignore[arg-type]
    got = attend(batch, torch.float8_e4m3fn, **options).double()
    torch.testing.assert_close(got, want, **close_to(isa, torch.float8_e4m3fn))


def values_read(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [T, G, Dv] as attention reads them back: a context of one key weighs it with 1."""
    tokens, heads, dim = v.shape
    k_cache, v_cache = ops.allocate_kv(tokens, heads, 16, dim, dim, dtype, "cpu")
    ops.write_kv(torch.zeros_like(v), v, k_cache, v_cache, torch.arange(tokens) * 16)
    tables, ones = torch.arange(tokens, dtype=torch.int32)[:, None], torch.ones(tokens, dtype=torch.int32)
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    return ops.paged_attention(torch.zeros_like(v), k_cache, v_cache, tables, ones, starts, 1.0)


def test_fp8_keeps_the_nearest_number_of_the_head_s_scale(isa: str) -> None:
    """Sizes from 1e-12 to 1e15; ties, what is too small, and heads whose greatest value just exceeds 448."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(200, 2, 64, generator=generator) * torch.logspace(-12, 15, 200)[:, None, None]
    v[0, 0, :4] = torch.tensor([448.0, 449.0, 1.0625, 1.5 * 2.0**-6])
    v[1, 0, :6] = torch.tensor([448.0, 0.0, 1.1875, 2.0**-7, 1.01 * 2.0**-7, 0.99 * 2.0**-6])
    v[1, 0, 6:] = v[0, 0, 4:] = 0
    got, want = values_read(v, torch.float8_e4m3fn), stored(v, torch.float8_e4m3fn)
    assert torch.equal(got.double(), want)
    error, greatest = (got.double() - v.double()).abs(), v.double().abs().amax(-1, keepdim=True)
    assert (error <= torch.maximum(v.double().abs() / 16, greatest * 2.0**-14)).all()  # the stated bound


@pytest.mark.parametrize(("query", "keys", "values"), [(1e-12, 1e12, 1e-12), (1e10, 1e-10, 1e15), (1e-6, 1e15, 1), (1, 1e-20, 1)])
def test_fp8_attention_holds_at_any_likely_scale(isa: str, query: float, keys: float, values: float) -> None:
    """Numbers are read as floats near the smallest ones there are: products must not fall below them, nor sums overflow."""
    batch = paged_batch([300, 90], [1, 20], head_dim=64, dtype=torch.float32)
    batch.query.mul_(query)
    for k, v in zip(batch.keys, batch.values, strict=True):
        k.mul_(keys)
        v.mul_(values)
    scale = 64**-0.5 / (query * keys)
    k_cache, v_cache = filled_cache(ops, batch, torch.float8_e4m3fn)
    got = ops.paged_attention(batch.query, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_start, scale)
    want = dense_attention(kept(batch, torch.float8_e4m3fn), scale)
    torch.testing.assert_close(got.double() / values, want / values, **close_to(isa, torch.float8_e4m3fn))


def test_fp8_values_too_great_are_not_finite_rather_than_wrong(isa: str) -> None:
    v = torch.full((1, 1, 16), 1e18)
    assert not values_read(v, torch.float8_e4m3fn).isfinite().any()


def test_fp8_zeros_stay_zeros_and_what_is_not_finite_spoils_its_own_head_only(isa: str) -> None:
    v = torch.randn(4, 2, 20, generator=torch.Generator().manual_seed(0))
    v[0, 0] = 0
    v[1, 0, 3], v[2, 1, 7] = float("nan"), float("-inf")
    got = values_read(v, torch.float8_e4m3fn)
    assert not got[0, 0].any()
    assert got[1, 0].isnan().all() and got[2, 1].isnan().all()
    assert got[1, 1].isfinite().all() and got[2, 0].isfinite().all() and got[3].isfinite().all()


def test_a_key_that_is_not_finite_is_not_overlooked(isa: str) -> None:
    batch = paged_batch([20], [1], head_dim=16, dtype=torch.float32)
    batch.keys[0][5, 0, 3] = float("nan")
    got = attend(batch, torch.float8_e4m3fn)
    assert got[0, :2].isnan().all() and got[0, 2:].isfinite().all()  # query heads 0 and 1 look at key head 0


@pytest.mark.parametrize("dtype", NARROW)
def test_a_row_is_the_same_alone_in_a_batch_and_in_any_chunking(isa: str, dtype: torch.dtype) -> None:
    batch = paged_batch([400, 33, 129], [70, 1, 129], head_dim=80, block_size=32, dtype=torch.float32)
    k_cache, v_cache = filled_cache(ops, batch, dtype)
    whole = ops.paged_attention(batch.query, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_start, 0.1)
    starts = batch.query_start.tolist()
    for sequence, context in enumerate(batch.context_lens.tolist()):
        rows = starts[sequence + 1] - starts[sequence]
        for chunk in (1, 13):
            for first in range(0, rows, chunk):
                count = min(chunk, rows - first)
                begin = starts[sequence] + first
                length = torch.tensor([context - rows + first + count], dtype=torch.int32)
                one = ops.paged_attention(
                    batch.query[begin : begin + count],
                    k_cache,
                    v_cache,
                    batch.block_tables[sequence : sequence + 1],
                    length,
                    torch.tensor([0, count], dtype=torch.int32),
                    0.1,
                )
                assert torch.equal(one, whole[begin : begin + count])


@pytest.mark.parametrize("dtype", NARROW)
def test_fused_writes_store_what_separate_ones_do(isa: str, dtype: torch.dtype) -> None:
    tokens, heads, kv_heads, dim = 9, 4, 2, 48
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=torch.Generator().manual_seed(0))
    angle = torch.arange(tokens)[:, None] * torch.logspace(0, -3, dim // 2)[None]
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:tokens]
    fused, apart = (ops.allocate_kv(4, kv_heads, 16, dim, dim, dtype, "cpu") for _ in range(2))
    query = ops.rope_write_kv(qkv, heads, kv_heads, angle.cos(), angle.sin(), *fused, slots)
    q, k, v = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    ops.write_kv(ops.rope(k, angle.cos(), angle.sin()), v, *apart, slots)
    assert query.shape == (tokens, heads, dim) and torch.equal(query, ops.rope(q, angle.cos(), angle.sin()))
    assert all(torch.equal(one, other) for one, other in zip(fused, apart, strict=True))


def test_fp8_blocks_are_copied_with_their_powers(isa: str) -> None:
    batch = paged_batch([32], [1], head_dim=64, dtype=torch.float32)
    k_cache, v_cache = filled_cache(ops, batch, torch.float8_e4m3fn)
    want = attend(batch, torch.float8_e4m3fn)
    free = next(i for i in range(batch.num_blocks) if i not in batch.block_tables[0, :2].tolist())
    ops.copy_blocks([k_cache, v_cache], batch.block_tables[0, :1].long(), torch.tensor([free]))
    batch.block_tables[0, 0] = free
    arguments = (batch.block_tables, batch.context_lens, batch.query_start, 64**-0.5)
    assert torch.equal(ops.paged_attention(batch.query, k_cache, v_cache, *arguments), want)


def test_fp8_takes_half_of_bfloat16_and_a_byte_per_head() -> None:
    sizes = [sum(t.nbytes for t in ops.allocate_kv(3, 2, 32, 64, 64, dtype, "cpu")) for dtype in (torch.float8_e4m3fn, torch.bfloat16)]
    assert sizes[0] <= 0.516 * sizes[1]
