"""All decoder layers in one operation: to the bit what their parts give, for any shape, and near float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from twinplane.kernels import decoder, reference, registry
from twinplane.kernels.cpu import ops
from twinplane.kernels.decoder import Decoder, DecoderLayer, DecoderStep

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
    angle = torch.arange(64)[:, None] * torch.logspace(0, -2, head_dim // 2)[None]
    tables = torch.randperm(2 * len(tokens), generator=torch.Generator().manual_seed(0)).to(torch.int32).view(-1, 2)
    slots = [tables[i, torch.arange(n) // 32].long() * 32 + torch.arange(n) % 32 for i, n in enumerate(tokens)]
    return DecoderStep(
        num_heads=heads,
        num_kv_heads=kv_heads,
        scale=head_dim**-0.5,
        eps=1e-5,
        cos=angle.cos(),
        sin=angle.sin(),
        positions=torch.cat([torch.arange(n) for n in tokens]),
        slots=torch.cat(slots),
        block_tables=tables,
        context_lens=torch.tensor(tokens, dtype=torch.int32),
        query_start=torch.tensor([0, *torch.tensor(tokens).cumsum(0).tolist()], dtype=torch.int32),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_one_call_gives_to_the_bit_what_its_parts_do(isa: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    hidden, heads, kv_heads, head_dim, inner = shape
    layers = [
        make_layer(*shape, norms=True),
        replace(make_layer(hidden, heads, kv_heads, head_dim, inner + 3), window=5),  # not the size, not the keys of its neighbours
        make_layer(*shape, norms=True),
    ]
    step = make_step(heads, kv_heads, head_dim, [1, 40, 3])
    caches = [[ops.allocate_kv(6, kv_heads, 32, head_dim, head_dim, dtype, "cpu") for _ in layers] for _ in range(2)]
    want = decoder.decoder_layers(ops, normal(44, hidden), layers, step, *zip(*caches[0], strict=True))
    given = normal(44, hidden)
    got = ops.decoder_layers(given, layers, step, *zip(*caches[1], strict=True))
    assert torch.equal(got, want) and got is given  # in place
    for one, other in zip(*caches, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_quantized_weights_give_to_the_bit_what_their_parts_do(isa: str, kind: str, activations: str) -> None:
    def pack(weight: Tensor, bias: Tensor | None = None) -> ops.PackedLinear:
        return ops.quantize_linear(weight, kind, bias, activations)

    layers, step = [make_layer(64, 4, 2, 16, 96, pack=pack)] * 2, make_step(4, 2, 16, [9, 1])
    caches = [[ops.allocate_kv(4, 2, 32, 16, 16, torch.float32, "cpu") for _ in layers] for _ in range(2)]
    want = decoder.decoder_layers(ops, normal(10, 64), layers, step, *zip(*caches[0], strict=True))
    assert torch.equal(ops.decoder_layers(normal(10, 64), layers, step, *zip(*caches[1], strict=True)), want)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_equals_float64(isa: str, shape: tuple[int, int, int, int, int]) -> None:
    hidden, heads, kv_heads, head_dim, _ = shape
    step = make_step(heads, kv_heads, head_dim, [1, 40, 3])
    k_cache, v_cache = ops.allocate_kv(6, kv_heads, 32, head_dim, head_dim, torch.float32, "cpu")
    got = ops.decoder_layers(normal(44, hidden), [make_layer(*shape)], step, [k_cache], [v_cache])

    def pack(weight: Tensor, bias: Tensor | None = None) -> reference.PackedLinear:
        return reference.pack_linear(weight.double(), None if bias is None else bias.double())

    layer = make_layer(*shape, pack=pack)
    layer = replace(layer, input_norm=layer.input_norm.double(), mlp_norm=layer.mlp_norm.double())
    k_cache, v_cache = reference.allocate_kv(6, kv_heads, 32, head_dim, head_dim, torch.float64, "cpu")
    want = decoder.decoder_layers(reference, normal(44, hidden).double(), [layer], step, [k_cache], [v_cache])
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sample_tokens", [[], [0], [3, 9], list(range(10))])
def test_a_whole_model_gives_to_the_bit_what_its_parts_do(isa: str, sample_tokens: list[int]) -> None:
    embedding, head = ops.quantize_linear(normal(90, 64, seed=10), "Q8_0", None, "int8"), ops.pack_linear(normal(70, 64, seed=11))
    layers = [make_layer(64, 4, 2, 16, 96)] * 2
    model, step = Decoder(embedding, layers, normal(64, seed=12), head), make_step(4, 2, 16, [9, 1])
    given = torch.tensor([5, 0, 89, 7, 7, 1, 2, 3, 4, 5]), step, torch.tensor(sample_tokens, dtype=torch.long)
    caches = [[ops.allocate_kv(4, 2, 32, 16, 16, torch.float32, "cpu") for _ in layers] for _ in range(2)]
    want = decoder.decoder_logits(registry.select("cpu"), model, *given, *zip(*caches[0], strict=True))
    got = ops.decoder_logits(model, *given, *zip(*caches[1], strict=True))
    assert got.shape == (len(sample_tokens), 70) and torch.equal(got, want)
    for one, other in zip(*caches, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_layers_of_different_sizes_take_turns(isa: str) -> None:
    """What is kept from call to call is never that of another size."""
    first, second = SHAPES[1], SHAPES[2]
    for tokens in ([5], [2, 7], [5]):
        for shape in (first, second):
            hidden, heads, kv_heads, head_dim, _ = shape
            layer, step = make_layer(*shape), make_step(heads, kv_heads, head_dim, tokens)
            caches = [ops.allocate_kv(4, kv_heads, 32, head_dim, head_dim, torch.float32, "cpu") for _ in range(2)]
            want = decoder.decoder_layers(ops, normal(sum(tokens), hidden), [layer], step, *([each] for each in caches[0]))
            got = ops.decoder_layers(normal(sum(tokens), hidden), [layer], step, *([each] for each in caches[1]))
            assert torch.equal(got, want)


# The shape of a linear stands for one.
WRONG_LAYERS = [
    ({"input_norm": torch.ones(63)}, r"input_norm must be \[hidden\] = \[64\], got \[63\]"),
    ({"mlp_norm": None}, "mlp_norm must be a CPU torch tensor or a numpy array, not NoneType"),
    ({"k_norm": torch.ones(16, dtype=torch.long)}, "k_norm must be float32, got int64"),
    ({"qkv": (127, 64)}, r"qkv has 127 output features, \(H \+ 2 G\) D is 128"),
    ({"qkv": (128, 65)}, r"qkv must be \[N, K\] = \[any, 64\], got \[128, 65\]"),
    ({"output": (63, 64)}, r"output must be \[N, K\] = \[64, 64\], got \[63, 64\]"),
    ({"gate_up": (95, 64)}, "gate_up has 95 output features, an odd number"),
    ({"down": (64, 95)}, r"down must be \[N, K\] = \[64, 96\], got \[64, 95\]"),
]


@pytest.mark.parametrize(("changed", "match"), WRONG_LAYERS)
def test_what_is_wrong_in_the_last_layer_is_named_before_the_first_has_run(changed: dict[str, Any], match: str) -> None:
    layer = make_layer(64, 4, 2, 16, 96)
    changed = {name: ops.pack_linear(torch.zeros(value)) if isinstance(value, tuple) else value for name, value in changed.items()}
    refused(f"^layer 1: {match}", [layer, replace(layer, **changed)])


def test_what_is_of_another_type_is_named() -> None:
    layer = make_layer(64, 4, 2, 16, 96)
    refused("^layer 1: down must be a PackedLinear, not Tensor", [layer, replace(layer, down=torch.zeros(64, 96))], error=TypeError)
    refused("^num_heads must be a number, not str", [layer, layer], error=TypeError, num_heads="many")


WRONG_STEPS = [
    ({"num_kv_heads": 4}, "layer 0: k_cache has 2 heads, num_kv_heads is 4"),
    ({"num_heads": 3}, "layer 0: num_heads is 3, which is no multiple of the 2 heads of k_cache"),
    ({"positions": torch.tensor([0, 1, 2, 3, 4, 64])}, r"layer 0: positions\[5\] is 64; cos has 64 rows"),
    ({"positions": torch.tensor([-1, 1, 2, 3, 4, 5])}, r"layer 0: positions\[0\] is -1"),
    ({"positions": torch.zeros(5, dtype=torch.long)}, r"layer 0: positions must be \[T\] = \[6\], got \[5\]"),
    ({"cos": torch.zeros(64, 9), "sin": torch.zeros(64, 9)}, "layer 0: cos rotates 18 dims of heads that have 16"),
    ({"sin": torch.zeros(63, 8)}, "layer 0: sin must be"),
    ({"slots": torch.full((6,), 128)}, r"layer 0: slots\[0\] is 128; 4 blocks of 32 tokens have slots 0 to 127"),
    (
        {"block_tables": torch.tensor([[0, 0], [4, 0]], dtype=torch.int32)},
        "layer 0: block_tables names block 4 for tokens 0 ff. of sequence 1",
    ),
    ({"block_tables": torch.zeros(3, 2, dtype=torch.int32)}, r"block_tables must be \[S, max_blocks\] = \[2, any\], got \[3, 2\]"),
    ({"context_lens": torch.tensor([65, 2], dtype=torch.int32)}, "layer 0: block_tables has 2 columns; sequence 0 of 65 tokens needs 3"),
    ({"query_start": torch.tensor([0, 4, 7], dtype=torch.int32)}, "layer 0: query_start must begin with 0 and end with at most the 6"),
]


@pytest.mark.parametrize(("changed", "match"), WRONG_STEPS)
def test_what_is_wrong_in_the_step_is_named(changed: dict[str, Any], match: str) -> None:
    refused(f"^{match}", [make_layer(64, 4, 2, 16, 96)] * 2, **changed)


def test_a_smaller_cache_of_the_last_layer_is_seen_before_the_first_has_run() -> None:
    refused("^layer 1: slots.* is .*; 1 blocks of 32 tokens", [make_layer(64, 4, 2, 16, 96)] * 2, blocks=(4, 1))
    refused("^2 layers have 1 k_caches and 1 v_caches", [make_layer(64, 4, 2, 16, 96)] * 2, blocks=(4,))


def refused(
    match: str, layers: list[DecoderLayer], *, error: type[Exception] = ValueError, blocks: Sequence[int] = (4, 4), **changed: Any
) -> None:
    """Two layers of (64, 4, 2, 16, 96) over six tokens; with an error nothing has been written."""
    step = replace(make_step(4, 2, 16, [4, 2]), **changed)
    caches = [ops.allocate_kv(count, 2, 32, 16, 16, torch.float32, "cpu") for count in blocks]
    residual = normal(6, 64)
    with pytest.raises(error, match=match):
        ops.decoder_layers(residual, layers, step, *zip(*caches, strict=True))
    assert torch.equal(residual, normal(6, 64)) and not any(each.any() for cache in caches for each in cache)


def test_what_is_wrong_before_or_after_the_layers_is_named() -> None:
    packed = ops.pack_linear(torch.zeros(90, 64))
    model, ids, sample_tokens = Decoder(packed, [make_layer(64, 4, 2, 16, 96)], torch.ones(64), packed), torch.arange(6), torch.arange(6)

    def refused_logits(match: str, model: Decoder, ids: Tensor, sample_tokens: Tensor) -> None:
        k_cache, v_cache = ops.allocate_kv(4, 2, 32, 16, 16, torch.float32, "cpu")
        with pytest.raises(ValueError, match=match):
            ops.decoder_logits(model, ids, make_step(4, 2, 16, [4, 2]), sample_tokens, [k_cache], [v_cache])
        assert not k_cache.any() and not v_cache.any()

    refused_logits(r"^token_ids\[5\] is 90; there are 90 rows of the embedding", model, ids + 85, sample_tokens)
    refused_logits(r"^sample_tokens\[5\] is 6; there are 6 tokens", model, ids, sample_tokens + 1)
    refused_logits("^sample_tokens must be int64", model, ids, sample_tokens.int())
    refused_logits(r"^norm must be \[hidden\] = \[64\], got \[63\]", replace(model, norm=torch.ones(63)), ids, sample_tokens)
    wide = ops.pack_linear(torch.zeros(90, 65))
    refused_logits(r"^head must be \[N, K\] = \[any, 64\], got \[90, 65\]", replace(model, head=wide), ids, sample_tokens)
    refused_logits("^layer 0: qkv must be", Decoder(wide, model.layers, torch.ones(65), wide), ids, sample_tokens)
    refused_logits("^layer 0: positions must be", model, ids[:5], sample_tokens[:5])
    refused_logits("^0 layers have 1 k_caches and 1 v_caches", replace(model, layers=[]), ids, sample_tokens)


def test_a_device_whose_operations_come_from_two_modules_gets_the_layers_out_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    native = registry.select("cpu")
    assert native.decoder_layers is ops.decoder_layers and native.decoder_logits is ops.decoder_logits
    monkeypatch.delattr(ops, "write_kv")
    for mixed in (registry.select("cpu"), registry.select("cpu", only="reference")):
        assert isinstance(mixed.decoder_layers, partial) and isinstance(mixed.decoder_logits, partial)
