"""Paged attention and the cache of the native CPU kernels: right, and the same to the bit however the work is cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_oracle import PagedBatch, dense_attention, filled_cache, paged_batch
from torch import Tensor
from twinplane.kernels import _cpu, reference
from twinplane.kernels.cpu import ops

DTYPES = (torch.float32, torch.bfloat16)
SPLIT = _cpu.ATTENTION_SPLIT
relaxed = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def batch_of(contexts: list[int], new: list[int], dtype: torch.dtype = torch.float32, **shape: int) -> PagedBatch:
    """A float32 batch whose keys and values the cache's dtype holds exactly."""
    batch = paged_batch(contexts, new, dtype=torch.float32, **shape)
    batch.keys[:] = [keys.to(dtype).float() for keys in batch.keys]
    batch.values[:] = [values.to(dtype).float() for values in batch.values]
    return batch


def attend(
    batch: PagedBatch, dtype: torch.dtype = torch.float32, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    k_cache, v_cache = filled_cache(ops, batch, dtype)
    scale = batch.query.shape[2] ** -0.5
    return ops.paged_attention(
        batch.query, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_start, scale, window, softcap, sinks
    )


def assert_right(
    batch: PagedBatch,
    got: Tensor,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Arithmetic is float32, but AMX holds queries and weights that meet bfloat16 to 2^-16 of themselves."""
    want = dense_attention(batch, batch.query.shape[2] ** -0.5, window, softcap, sinks)
    in_pieces = dtype == torch.bfloat16 and _cpu.isa() == "amx"
    torch.testing.assert_close(got.double(), want, atol=3e-5 if in_pieces else 3e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256, 1, 7, 33])
def test_attention_equals_float64_for_every_head_dim(isa: str, head_dim: int, dtype: torch.dtype) -> None:
    batch = batch_of([1, 40, 19], [1, 1, 5], dtype, head_dim=head_dim)
    assert_right(batch, attend(batch, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (7, 1), (100, 2)])
def test_attention_equals_float64_for_every_head_grouping_and_block_size(
    isa: str, heads: int, kv_heads: int, block_size: int, dtype: torch.dtype
) -> None:
    batch = batch_of([70, 33], [1, 4], dtype, heads=heads, kv_heads=kv_heads, block_size=block_size)
    assert_right(batch, attend(batch, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("border", [16, 32, 64, SPLIT, 2 * SPLIT])
def test_attention_equals_float64_around_block_and_partition_borders(isa: str, border: int, dtype: torch.dtype) -> None:
    contexts = [border - 1, border, border + 1, border + 2]
    batch = batch_of(contexts, [1, 1, 1, 3], dtype, heads=2, kv_heads=1, block_size=32)
    assert_right(batch, attend(batch, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (16, 0.0), (100, 0.0), (SPLIT + 3, 0.0), (0, 2.0), (37, 2.0)])
def test_window_softcap_and_sinks_equal_float64(isa: str, window: int, softcap: float, dtype: torch.dtype) -> None:
    batch = batch_of([1, 300, 90, 2 * SPLIT + 9], [1, 1, 30, 2], dtype, heads=2, kv_heads=1)
    assert_right(batch, attend(batch, dtype, window, softcap), dtype, window, softcap)
    sinks = torch.tensor([0.3, 5.0])
    assert_right(batch, attend(batch, dtype, window, softcap, sinks), dtype, window, softcap, sinks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_whole_prompt_equals_float64(isa: str, dtype: torch.dtype, block_size: int) -> None:
    batch = batch_of([150], [150], dtype, heads=3, kv_heads=1, head_dim=16, block_size=block_size)
    assert_right(batch, attend(batch, dtype), dtype)


def test_value_heads_may_be_narrower_than_key_heads(isa: str) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(40, 2, 24, generator=generator), torch.randn(40, 2, 10, generator=generator)
    query = torch.randn(3, 4, 24, generator=generator)
    results = []
    for each, wide in ((ops, torch.float32), (reference, torch.float64)):
        k_cache, v_cache = each.allocate_kv(3, 2, 16, 24, 10, wide, "cpu")
        each.write_kv(keys.to(wide), values.to(wide), k_cache, v_cache, torch.arange(40))
        tables, contexts, starts = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1, 2]], [40], [0, 3]))
        results.append(each.paged_attention(query.to(wide), k_cache, v_cache, tables, contexts, starts, 0.2))
    torch.testing.assert_close(results[0].double(), results[1], atol=3e-6, rtol=1e-5)


# ---------------------------------------------------------------------- the same bits, however the work is cut (INV-10)


def sequence_alone(batch: PagedBatch, dtype: torch.dtype, window: int) -> list[Tensor]:
    """Per sequence its whole prompt as decodes, one call per token: what every other cut must reproduce."""
    k_cache, v_cache = filled_cache(ops, batch, dtype)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    rows = []
    for i, table in enumerate(batch.block_tables):
        begin = int(batch.query_start[i])
        count = int(batch.query_start[i + 1]) - begin
        first = int(batch.context_lens[i]) - count
        rows.append(
            torch.cat(
                [
                    ops.paged_attention(
                        batch.query[begin + j : begin + j + 1],
                        k_cache,
                        v_cache,
                        table[None],
                        torch.tensor([first + j + 1], dtype=torch.int32),
                        starts,
                        0.25,
                        window,
                    )
                    for j in range(count)
                ]
            )
        )
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 50])
def test_a_chunk_gives_the_bits_of_its_tokens_decoded_one_by_one(isa: str, dtype: torch.dtype, window: int) -> None:
    batch = batch_of([300, 61, 2 * SPLIT + 20], [90, 61, 40], dtype, heads=6, kv_heads=2)
    k_cache, v_cache = filled_cache(ops, batch, dtype)
    got = ops.paged_attention(batch.query, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_start, 0.25, window)
    assert torch.equal(got, torch.cat(sequence_alone(batch, dtype, window)))


@relaxed
@given(data=st.data())
def test_any_chunking_order_and_thread_count_gives_the_same_bits(restored_threads: None, data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.integers(1, 2 * SPLIT + 40), min_size=1, max_size=4))
    new = [data.draw(st.integers(1, min(context, 30))) for context in contexts]
    dtype, window = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([0, 40]))
    heads, kv_heads = data.draw(st.sampled_from([(3, 1), (4, 2), (13, 1)]))
    batch = batch_of(contexts, new, dtype, heads=heads, kv_heads=kv_heads, head_dim=data.draw(st.sampled_from([16, 20])))
    want = sequence_alone(batch, dtype, window)
    k_cache, v_cache = filled_cache(ops, batch, dtype)
    _cpu.set_threads(data.draw(st.integers(1, 4)))
    pieces = []  # (sequence, first query, one past the last)
    for i, count in enumerate(new):
        cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=3))})
        pieces += [(i, a, b) for a, b in itertools.pairwise(cuts)]
    pieces = data.draw(st.permutations(pieces))
    starts = [int(s) for s in batch.query_start]
    query = torch.cat([batch.query[starts[i] + a : starts[i] + b] for i, a, b in pieces])
    got = ops.paged_attention(
        query,
        k_cache,
        v_cache,
        torch.stack([batch.block_tables[i] for i, _, _ in pieces]),
        torch.tensor([contexts[i] - new[i] + b for i, _, b in pieces], dtype=torch.int32),
        torch.tensor([0, *itertools.accumulate(b - a for _, a, b in pieces)], dtype=torch.int32),
        0.25,
        window,
    )
    assert torch.equal(got, torch.cat([want[i][a:b] for i, a, b in pieces]))


@relaxed
@given(data=st.data())
def test_decodes_that_share_blocks_get_the_bits_they_get_alone(isa: str, restored_threads: None, data: st.DataObject) -> None:
    """Samples, beams, requests behind one system prompt: read once, in whatever families the tables make them; beside strangers and
    chunks. Leading blocks are those of an earlier sequence, which may have taken its own from another."""
    dtype, window = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([0, 0, 0, 300]))
    heads, kv_heads = data.draw(st.sampled_from([(3, 1), (4, 2), (13, 1), (60, 1)]))
    contexts = data.draw(st.lists(st.integers(1, 3 * SPLIT + 40), min_size=2, max_size=7))
    new = [data.draw(st.sampled_from([1, 1, 1, 1, 5])) if context > 5 else 1 for context in contexts]
    block_size = data.draw(st.sampled_from([16, 32, 64]))
    batch = batch_of(contexts, new, dtype, heads=heads, kv_heads=kv_heads, head_dim=16, block_size=block_size)
    k_cache, v_cache = filled_cache(ops, batch, dtype)
    for i in range(1, len(contexts)):
        other = data.draw(st.sampled_from([0, i - 1]))
        blocks = data.draw(st.integers(0, min(contexts[i], contexts[other]) // block_size))
        batch.block_tables[i, :blocks] = batch.block_tables[other, :blocks]
    sinks = data.draw(st.sampled_from([None, torch.linspace(-1, 3, heads)]))
    _cpu.set_threads(data.draw(st.integers(1, 4)))
    got = ops.paged_attention(
        batch.query, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_start, 0.25, window, 0.0, sinks
    )
    for i in range(len(contexts)):
        rows = slice(int(batch.query_start[i]), int(batch.query_start[i + 1]))
        alone = ops.paged_attention(
            batch.query[rows],
            k_cache,
            v_cache,
            batch.block_tables[i : i + 1],
            batch.context_lens[i : i + 1],
            torch.tensor([0, new[i]], dtype=torch.int32),
            0.25,
            window,
            0.0,
            sinks,
        )
        assert torch.equal(got[rows], alone)


def test_samples_of_one_prompt_equal_float64(isa: str) -> None:
    """The same context for everybody but for the last blocks, up to and beyond what one tile holds."""
    for dtype in DTYPES:
        batch = batch_of([2 * SPLIT + 9] * 20, [1] * 20, dtype, heads=6, kv_heads=2)
        for i in range(1, 20):
            shared = 2 * SPLIT - 16 * (i % 2)
            batch.keys[i][:shared], batch.values[i][:shared] = batch.keys[0][:shared], batch.values[0][:shared]
        k_cache, v_cache = filled_cache(ops, batch, dtype)
        for i in range(1, 20):
            shared = 2 * SPLIT - 16 * (i % 2)
            batch.block_tables[i, : shared // 16] = batch.block_tables[0, : shared // 16]
        got = ops.paged_attention(
            batch.query, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_start, batch.query.shape[2] ** -0.5
        )
        assert_right(batch, got, dtype)


def test_which_physical_blocks_hold_a_sequence_does_not_matter(isa: str) -> None:
    results = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        batch = batch_of([60], [60], heads=2, kv_heads=1)
        batch.block_tables[0, :4] = torch.tensor(order, dtype=torch.int32)
        results.append(attend(batch))
    assert torch.equal(*results)


def test_stale_and_poisoned_memory_beyond_the_context_is_never_seen(isa: str) -> None:
    """The rest of the last block, blocks of others, and blocks that left the window may hold anything."""
    for dtype, window in itertools.product(DTYPES, (0, 20)):
        batch = batch_of([37, 90], [1, 6], dtype, heads=2, kv_heads=1)
        want = attend(batch, dtype, window)
        k_cache, v_cache = ops.allocate_kv(batch.num_blocks, 1, 16, 16, 16, dtype, "cpu")
        k_cache.fill_(float("nan"))
        v_cache.fill_(float("nan"))
        visible = [(i, max(0, c - n - window + 1) if window else 0, c) for i, (c, n) in enumerate(((37, 1), (90, 6)))]
        for i, first, context in visible:
            ops.write_kv(batch.keys[i][first:], batch.values[i][first:], k_cache, v_cache, batch.slots(i, first, context))
            batch.block_tables[i, : first // 16] = 10_000_000  # gone: never looked up
        got = ops.paged_attention(batch.query, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_start, 0.25, window)
        assert torch.equal(got, want)


def test_a_poisoned_sequence_fails_alone(isa: str) -> None:
    batch = batch_of([50, 50, 50], [1, 4, 1], heads=2, kv_heads=1)
    want = attend(batch)
    batch.values[1][10] = float("nan")
    got = attend(batch)
    assert got[1:5].isnan().all() and torch.equal(got[[0, 5]], want[[0, 5]])


def test_scores_of_any_size_do_not_overflow(isa: str) -> None:
    batch = batch_of([40], [3], heads=2, kv_heads=1)
    batch.query.mul_(1e4)
    got = attend(batch)[0, :, 0]  # an average of values, whatever the weights
    values = batch.values[0][:38, 0, 0]
    assert (got >= values.min() - 1e-6).all() and (got <= values.max() + 1e-6).all()


def test_a_table_of_permanent_rows_is_read_as_it_lies() -> None:
    batch = batch_of([30, 50], [1, 2], heads=2, kv_heads=1)
    want = attend(batch)
    k_cache, v_cache = filled_cache(ops, batch, torch.float32)
    permanent = torch.full((9, 64), -1, dtype=torch.int32)
    rows = torch.tensor([7, 2], dtype=torch.int32)
    permanent[rows.long(), : batch.block_tables.shape[1]] = batch.block_tables
    out = torch.empty_like(want)
    _cpu.paged_attention(
        batch.query, k_cache, v_cache, permanent, batch.context_lens, batch.query_start, out, 0.25, rows=rows.numpy().view("u4")
    )
    assert torch.equal(out, want)


# -------------------------------------------------------------------------------------------------------------- cache


def logical(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """A cache in the reference's layout, [N, G, B, D] and [N, G, B, Dv]. See KvType (kernels/cpu/kernels.hpp)."""
    if k_cache.dtype != torch.bfloat16:
        return k_cache.transpose(3, 4).flatten(2, 3), v_cache
    *shape, dim, lanes = k_cache.shape
    paired = dim // 2 * 2
    pairs = k_cache[..., :paired, :].reshape(*shape, paired // 2, lanes, 2).transpose(-1, -2).reshape(*shape, paired, lanes)
    keys = torch.cat([pairs, k_cache[..., paired:, :]], dim=-2)
    values = v_cache.unflatten(2, (-1, 2)).flatten(3).unflatten(3, (-1, 2)).transpose(3, 4).flatten(2, 3)
    return keys.transpose(3, 4).flatten(2, 3), values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_written_keys_and_values_are_the_references_rounded_the_same_way(isa: str, dtype: torch.dtype, block_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(50, 3, 21, generator=generator), torch.randn(50, 3, 12, generator=generator)
    key[0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.3895e38])
    slots = torch.randperm(4 * block_size, generator=generator)[:50]
    ours, theirs = (each.allocate_kv(4, 3, block_size, 21, 12, dtype, "cpu") for each in (ops, reference))
    ops.write_kv(key, value, *ours, slots)
    reference.write_kv(key, value, *theirs, slots)
    for mine, want in zip(logical(*ours), theirs, strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("rotated", [32, 20])
def test_fused_rotation_and_write_equal_the_reference(isa: str, rotated: int, norms: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, heads, kv_heads, dim = 21, 6, 2, 32
    x, weight = torch.randn(tokens, 40, generator=generator), torch.randn((heads + 2 * kv_heads) * dim, 40, generator=generator)
    q_norm, k_norm = (torch.randn(dim, generator=generator) for _ in range(2)) if norms else (None, None)
    cos, sin = reference.rope_cos_sin(torch.arange(tokens), 100.0 ** -(torch.arange(rotated // 2) / (rotated // 2)))
    slots = torch.randperm(32, generator=generator)[:tokens]
    packed = ops.pack_linear(weight)
    caches = [each.allocate_kv(2, kv_heads, 16, dim, dim, torch.float32, "cpu") for each in (ops, ops, reference)]
    fused = ops.linear_rope_write_kv(x, packed, heads, kv_heads, cos, sin, *caches[0], slots, q_norm, k_norm, 1e-6)
    arguments = (heads, kv_heads, cos, sin)
    apart = ops.rope_write_kv(ops.linear(x, packed), *arguments, *caches[1], slots, q_norm, k_norm, 1e-6)
    want = reference.rope_write_kv(reference.linear(x, reference.pack_linear(weight)), *arguments, *caches[2], slots, q_norm, k_norm, 1e-6)
    assert torch.equal(fused, apart) and all(torch.equal(a, b) for a, b in zip(caches[0], caches[1], strict=True))
    torch.testing.assert_close(fused, want, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(logical(*caches[0]), caches[2], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copied_blocks_are_the_sources_as_they_were_before_any_copy(dtype: torch.dtype) -> None:
    caches = [torch.randn(6, 2, 1, 8, 16).to(dtype), torch.randn(6, 5).to(dtype)]
    want = [cache.clone() for cache in caches]
    sources, targets = torch.tensor([0, 1, 4, 2]), torch.tensor([1, 2, 3, 0])  # chained: 0 -> 1 -> 2 -> 0
    for cache in want:
        cache[targets] = cache[sources].clone()
    ops.copy_blocks(caches, sources, targets)
    assert all(torch.equal(a, b) for a, b in zip(caches, want, strict=True))


def test_k_and_v_of_all_layers_may_share_one_allocation_of_whole_blocks(isa: str) -> None:
    """The block stride is free, so that a block of every layer is one run of bytes."""
    batch = batch_of([40, 20], [1, 20], heads=2, kv_heads=2)
    want = attend(batch)
    pool = torch.full((batch.num_blocks, 3, 2, 2 * 16 * 16), 7.0)
    k_cache = pool[:, 1, 0].view(batch.num_blocks, 2, 1, 16, 16)
    v_cache = pool[:, 1, 1].view(batch.num_blocks, 2, 16, 16)
    ops.write_kv(torch.cat(batch.keys), torch.cat(batch.values), k_cache, v_cache, batch.all_slots())
    got = ops.paged_attention(batch.query, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_start, 0.25)
    assert torch.equal(got, want)
    assert (pool[:, [0, 2]] == 7).all()
