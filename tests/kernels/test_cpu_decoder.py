"""A whole decoder layer in one operation: to the bit what its parts give, for any shape, and near float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from twinplane.kernels import decoder, reference, registry
from twinplane.kernels.cpu import ops
from twinplane.kernels.decoder import DecoderLayer, DecoderStep

# (hidden, query heads, key heads, head dim, inner): sizes that are no multiple of 16, head dims of real models.
SHAPES = [
    (36, 3, 1, 7, 50),
    (64, 4, 2, 16, 96),
    (100, 2, 2, 80, 33),
    (64, 2, 1, 96, 64),
    (80, 3, 3, 112, 48),
    (72, 2, 1, 128, 64),
    (48, 2, 1, 256, 40),
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def make_layer(
    hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, *, norms: bool = False, pack=ops.pack_linear
) -> DecoderLayer:
    return DecoderLayer(
        input_norm=normal(hidden, seed=1) + 1,
        qkv=pack(normal((heads + 2 * kv_heads) * head_dim, hidden, seed=2), normal((heads + 2 * kv_heads) * head_dim, seed=3)),
        q_norm=normal(head_dim, seed=4) + 1 if norms else None,
        k_norm=normal(head_dim, seed=5) + 1 if norms else None,
        output=pack(normal(hidden, heads * head_dim, seed=6)),
        mlp_norm=normal(hidden, seed=7) + 1,
        gate_up=pack(normal(2 * inner, hidden, seed=8)),
        down=pack(normal(hidden, inner, seed=9)),
        window=0,
    )


def make_step(heads: int, kv_heads: int, head_dim: int, tokens: list[int]) -> DecoderStep:
    """New sequences of `tokens` tokens each, two blocks of 32 apiece, in an order of their own."""
    angle = torch.cat([torch.arange(n) for n in tokens])[:, None] * torch.logspace(0, -2, head_dim // 2)[None]
    tables = torch.randperm(2 * len(tokens), generator=torch.Generator().manual_seed(0)).to(torch.int32).view(-1, 2)
    slots = [tables[i, torch.arange(n) // 32].long() * 32 + torch.arange(n) % 32 for i, n in enumerate(tokens)]
    return DecoderStep(
        num_heads=heads,
        num_kv_heads=kv_heads,
        scale=head_dim**-0.5,
        eps=1e-5,
        cos=angle.cos(),
        sin=angle.sin(),
        slots=torch.cat(slots),
        block_tables=tables,
        context_lens=torch.tensor(tokens, dtype=torch.int32),
        query_start=torch.tensor([0, *torch.tensor(tokens).cumsum(0).tolist()], dtype=torch.int32),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_one_call_gives_to_the_bit_what_its_parts_do(isa: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    hidden, heads, kv_heads, head_dim, _ = shape
    layer, step = make_layer(*shape, norms=True), make_step(heads, kv_heads, head_dim, [1, 40, 3])
    caches = [ops.allocate_kv(6, kv_heads, 32, head_dim, head_dim, dtype, "cpu") for _ in range(2)]
    want = decoder.decoder_layer(ops, normal(44, hidden), layer, step, *caches[0])
    given = normal(44, hidden)
    got = ops.decoder_layer(given, layer, step, *caches[1])
    assert torch.equal(got, want) and got is given  # in place
    assert all(torch.equal(one, other) for one, other in zip(*caches, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_equals_float64(isa: str, shape: tuple[int, int, int, int, int]) -> None:
    hidden, heads, kv_heads, head_dim, _ = shape
    step = make_step(heads, kv_heads, head_dim, [1, 40, 3])
    got = ops.decoder_layer(
        normal(44, hidden), make_layer(*shape), step, *ops.allocate_kv(6, kv_heads, 32, head_dim, head_dim, torch.float32, "cpu")
    )

    def pack(weight: Tensor, bias: Tensor | None = None) -> reference.PackedLinear:
        return reference.pack_linear(weight.double(), None if bias is None else bias.double())

    layer = make_layer(*shape, pack=pack)
    layer = replace(layer, input_norm=layer.input_norm.double(), mlp_norm=layer.mlp_norm.double())
    cache = reference.allocate_kv(6, kv_heads, 32, head_dim, head_dim, torch.float64, "cpu")
    want = decoder.decoder_layer(reference, normal(44, hidden).double(), layer, step, *cache)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_layers_of_different_sizes_take_turns(isa: str) -> None:
    """What is kept from call to call is never that of another size."""
    first, second = SHAPES[1], SHAPES[2]
    for tokens in ([5], [2, 7], [5]):
        for shape in (first, second):
            hidden, heads, kv_heads, head_dim, _ = shape
            layer, step = make_layer(*shape), make_step(heads, kv_heads, head_dim, tokens)
            caches = [ops.allocate_kv(4, kv_heads, 32, head_dim, head_dim, torch.float32, "cpu") for _ in range(2)]
            want = decoder.decoder_layer(ops, normal(sum(tokens), hidden), layer, step, *caches[0])
            assert torch.equal(ops.decoder_layer(normal(sum(tokens), hidden), layer, step, *caches[1]), want)


def test_a_device_whose_operations_come_from_two_modules_gets_the_layer_out_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.select("cpu").decoder_layer is ops.decoder_layer
    assert isinstance(registry.select("cpu", only="reference").decoder_layer, partial)
    monkeypatch.delattr(ops, "write_kv")
    assert isinstance(registry.select("cpu").decoder_layer, partial)
