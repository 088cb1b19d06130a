"""The reference kernels against independent definitions: contiguous attention, complex rotation, published vectors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_oracle import dense_attention, filled_cache, paged_batch
from twinplane.kernels import reference, registry
from twinplane.kernels.cpu import ops as cpu_ops

sizes = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(
    sizes=sizes,
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    block_size=st.sampled_from([16, 32]),
    window=st.sampled_from([0, 1, 16, 20]),
    softcap=st.sampled_from([0.0, 5.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_paged_attention_equals_attention_over_contiguous_keys(sizes, heads, block_size, window, softcap, with_sinks, seed):
    contexts, new = [c for c, _ in sizes], [min(c, n) for c, n in sizes]
    batch = paged_batch(contexts, new, heads=heads[0], kv_heads=heads[1], block_size=block_size, seed=seed)
    sinks = torch.linspace(-1, 1, heads[0], dtype=torch.float64) if with_sinks else None
    k_cache, v_cache = filled_cache(reference, batch, torch.float64)
    got = reference.paged_attention(
        batch.query, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_start, 0.25, window, softcap, sinks
    )
    torch.testing.assert_close(got, dense_attention(batch, 0.25, window, softcap, sinks), rtol=1e-10, atol=1e-12)


def test_paged_attention_reads_no_block_beyond_the_context():
    batch = paged_batch([20], [1])
    k_cache, v_cache = filled_cache(reference, batch, torch.float64)
    used = set(batch.block_tables[0, :2].tolist())
    for block in set(range(batch.num_blocks)) - used:
        k_cache[block] = v_cache[block] = float("nan")
    out = reference.paged_attention(batch.query, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_start, 1.0)
    assert out.isfinite().all()


def test_sliding_window_does_not_read_blocks_that_left_the_window():
    batch = paged_batch([100], [2])
    k_cache, v_cache = filled_cache(reference, batch, torch.float64)
    for logical in range((98 - 16 + 1) // 16):
        k_cache[batch.block_tables[0, logical]] = float("nan")
    out = reference.paged_attention(
        batch.query, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_start, 1.0, sliding_window=16
    )
    assert out.isfinite().all()


def test_rope_is_a_rotation_of_complex_pairs_and_leaves_the_rest():
    x = torch.randn(5, 3, 12, dtype=torch.float64)
    inv_freq = torch.tensor([1.0, 0.3, 0.1, 0.01], dtype=torch.float64)
    positions = torch.tensor([0, 1, 7, 100, 3])
    got = reference.rope(x, *reference.rope_cos_sin(positions, inv_freq))
    turned = torch.complex(x[..., :4], x[..., 4:8]) * torch.exp(1j * positions[:, None, None] * inv_freq)
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag, x[..., 8:]), -1))


def test_rope_scores_depend_on_distance_only():
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    inv_freq = torch.tensor([1.0, 0.5, 0.2, 0.05], dtype=torch.float64)

    def score(p: int, j: int) -> float:
        turned_q = reference.rope(q, *reference.rope_cos_sin(torch.tensor([p]), inv_freq))
        return float((turned_q * reference.rope(k, *reference.rope_cos_sin(torch.tensor([j]), inv_freq))).sum())

    assert math.isclose(score(9, 4), score(105, 100), rel_tol=1e-9)


def test_add_rms_norm_returns_the_norm_of_the_sum_and_the_sum():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = x + residual
    normed, got = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    torch.testing.assert_close(got, total)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (8,), weight, 1e-5))


def test_rope_write_kv_equals_its_parts():
    tokens, heads, kv_heads, dim = 6, 4, 2, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, dtype=torch.float64)
    cos, sin = reference.rope_cos_sin(torch.arange(tokens), torch.rand(dim // 2, dtype=torch.float64))
    norm = torch.rand(dim, dtype=torch.float64)
    slots = torch.tensor([17, 3, 40, 41, 0, 31])
    k_cache, v_cache = reference.allocate_kv(3, kv_heads, 16, dim, dim, torch.float64, "cpu")
    query = reference.rope_write_kv(qkv, heads, kv_heads, cos, sin, k_cache, v_cache, slots, norm, norm, 1e-6)
    parts = qkv.view(tokens, -1, dim)
    torch.testing.assert_close(query, reference.rope(reference.rms_norm(parts[:, :heads], norm, 1e-6), cos, sin))
    for token, slot in enumerate(slots.tolist()):
        key = reference.rope(reference.rms_norm(parts[:, heads : heads + kv_heads], norm, 1e-6), cos, sin)[token]
        torch.testing.assert_close(k_cache[slot // 16, :, slot % 16], key)
        torch.testing.assert_close(v_cache[slot // 16, :, slot % 16], parts[token, heads + kv_heads :])


def test_copy_blocks_reads_every_source_before_it_writes():
    cache = torch.arange(4.0).view(4, 1).repeat(1, 3)
    reference.copy_blocks([cache], torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]))
    assert cache[:, 0].tolist() == [0.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, words):
    assert reference.philox4x32(counter, key) == words


def test_top_k_keeps_the_lower_id_among_ties():
    ids, _ = reference.kept_tokens(torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]), 1.0, top_k=3)
    assert ids.tolist() == [1, 3, 0]


def test_top_p_keeps_the_shortest_prefix_that_reaches_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    assert reference.kept_tokens(logits, 1.0, top_p=0.79)[0].tolist() == [0, 1]
    assert reference.kept_tokens(logits, 1.0, top_p=0.81)[0].tolist() == [0, 1, 2]
    assert reference.kept_tokens(logits, 1.0, top_p=0.0)[0].tolist() == [0]


def test_min_p_is_relative_to_the_most_likely_token():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    assert reference.kept_tokens(logits, 1.0, min_p=0.25)[0].tolist() == [0, 1, 2]
    assert reference.kept_tokens(logits, 1.0, min_p=1.0)[0].tolist() == [0]


def test_penalties_follow_their_definitions():
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    got = reference.penalize(logits, prompt=[0], output=[1, 1, 2], repetition=2.0, presence=0.25, frequency=0.5)
    assert got.tolist() == [1.0, -4.0 - 0.25 - 1.0, 0.5 - 0.25 - 0.5, 0.5]


def test_registry_takes_a_group_of_operations_from_one_module():
    ops = registry.select("cpu")
    for group in registry.GROUPS:
        assert len({ops.sources[name] for name in group}) == 1
    assert set(ops.sources) == set(reference.OPERATIONS)


def test_registry_fuses_only_what_one_module_understands(monkeypatch):
    assert registry.select("cpu").linear_rope_write_kv is cpu_ops.linear_rope_write_kv
    monkeypatch.delattr(cpu_ops, "write_kv")  # now the cache is the reference's, the packed weights are not
    ops = registry.select("cpu")
    assert (ops.sources["linear"], ops.sources["rope_write_kv"]) == (cpu_ops.__name__, reference.__name__)
    k_cache, v_cache = ops.allocate_kv(1, 1, 16, 8, 8, torch.float32, "cpu")
    x, weight, cos = torch.randn(2, 32), torch.randn(24, 32), torch.ones(2, 4)
    arguments = (1, 1, cos, torch.zeros(2, 4), k_cache, v_cache, torch.arange(2))
    query = ops.linear_rope_write_kv(x, ops.pack_linear(weight), *arguments)
    torch.testing.assert_close(query.flatten(1), x @ weight[:8].T)
    torch.testing.assert_close(v_cache[0, 0, :2], x @ weight[16:].T)


def test_registry_names_what_it_has_when_asked_for_something_else():
    with pytest.raises(ValueError, match=r"no kernels for device 'abacus'.*cpu"):
        registry.select("abacus")
    with pytest.raises(ValueError, match=r"has no implementation 'nowhere'"):
        registry.select("cpu", only="nowhere")


def test_rows_that_can_not_be_sampled_from_are_marked_and_affect_no_other() -> None:
    logits = torch.tensor(
        [[1.0, 3.0, 3.0], [1.0, float("nan"), 5.0], [-float("inf")] * 3, [float("inf"), 0.0, 1.0], [-float("inf"), 0.0, -1.0]]
    )
    ones, zeros = torch.ones(5), torch.zeros(5)
    assert reference.argmax(logits).tolist() == [1, -1, -1, -1, 1]
    assert reference.sample(logits, ones * 1e-40, zeros.long(), ones, zeros, ones / 2).tolist() == [2, -1, -1, -1, 1]
