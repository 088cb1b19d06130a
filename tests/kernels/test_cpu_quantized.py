"""Quantized weights of the native CPU kernels: every GGUF format as stored, and activations as 8-bit integers within their bound."""

from __future__ import annotations

from typing import Literal

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from twinplane.kernels import _cpu

BLOCKS_OF_32 = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
KINDS = (*BLOCKS_OF_32, *K_QUANTS)
Activations = Literal["float", "int8"]
relaxed = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_blocks(kind: str, out_features: int, in_features: int, seed: int = 0) -> tuple[NDArray[np.uint8], Tensor]:
    """GGUF blocks that use every number and every small scale, and the weights they stand for."""
    qtype = gguf.GGMLQuantizationType[kind]
    weights_per_block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (out_features, in_features // weights_per_block, block_bytes), dtype=np.uint8)
    halves = 2 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
    first = 208 if kind == "Q6_K" else 0
    scales = generator.uniform(-0.02, 0.02, (*blocks.shape[:2], halves)).astype(np.float16)
    blocks[:, :, first : first + 2 * halves] = scales.view(np.uint8).reshape(*blocks.shape[:2], 2 * halves)
    lines = blocks.reshape(out_features, -1)
    return lines, torch.from_numpy(gguf.dequantize(lines, qtype))


def pack(
    kind: str, out_features: int, in_features: int, activations: Activations = "float", bias: Tensor | None = None, seed: int = 0
) -> tuple[_cpu.PackedLinear, Tensor]:
    blocks, weight = random_blocks(kind, out_features, in_features, seed)
    return _cpu.PackedLinear.from_gguf(blocks, kind, bias, activations), weight  # type: ignore[arg-type]


def apply(packed: _cpu.PackedLinear, x: Tensor) -> Tensor:
    out = torch.full((len(x), packed.out_features), float("nan"))
    packed(x, out)
    return out


def rounding(x: Tensor, weight: Tensor) -> Tensor:
    """What float32 rounding of a chain of sums may amount to: [T, N] float64."""
    return 2.0**-23 * (weight.shape[1] / 16 + 8) * (x.double().abs() @ weight.double().abs().T) + 1e-12


def int8_bound(x: Tensor, weight: Tensor) -> Tensor:
    """The stated bound: half a step of each group of 32 activations, times the weights it meets."""
    steps = x.double().view(len(x), -1, 32).abs().amax(-1) / 127
    return steps / 2 @ weight.double().view(len(weight), -1, 32).abs().sum(-1).T * (1 + 1e-5) + rounding(x, weight)


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows_are_those_of_the_gguf_package(isa: str, kind: str) -> None:
    packed, weight = pack(kind, 70, 512)
    ids = torch.tensor([0, 69, 3, 33, 33, 17])
    rows = torch.empty(len(ids), 512)
    packed.gather(ids, rows)
    assert torch.equal(rows, weight[ids])


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_in_floats_compute_with_exactly_the_dequantized_weights(isa: str, kind: str) -> None:
    """To the bit: the same chain of multiply-adds as over float32 weights."""
    packed, weight = pack(kind, 50, 768)
    dense = _cpu.PackedLinear(weight)
    for rows in (1, 3, 8, 9, 40):
        assert torch.equal(apply(packed, normal(rows, 768, seed=rows)), apply(dense, normal(rows, 768, seed=rows)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_features", [1, 33, 100])
def test_int8_activations_stay_within_the_stated_bound(isa: str, kind: str, out_features: int) -> None:
    for in_features in (512, 1536):
        packed, weight = pack(kind, out_features, in_features, "int8")
        assert packed.activations == "int8"
        for rows in (1, 5, 97):
            x = normal(rows, in_features, seed=rows) * torch.logspace(-3, 3, in_features)  # groups of very different size
            error = (apply(packed, x).double() - x.double() @ weight.double().T).abs()
            assert (error <= int8_bound(x, weight)).all(), float((error / int8_bound(x, weight)).max())


@pytest.mark.parametrize("kind", KINDS)
def test_int8_products_equal_float64_on_the_rounded_activations(isa: str, kind: str) -> None:
    """Only x is rounded, and as documented: beside that the integers are summed exactly."""
    packed, weight = pack(kind, 40, 512, "int8")
    x = normal(41, 512)
    groups = x.view(41, -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    rounded = ((groups * (127 / groups.abs().amax(-1, keepdim=True))).round() * scale).view(41, 512)
    error = (apply(packed, x).double() - rounded.double() @ weight.double().T).abs()
    assert (error <= rounding(x, weight)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_int8_sums_do_not_overflow_at_the_extremes(isa: str, kind: str) -> None:
    """All numbers at one end, all activations at 127: a saturating instruction would show."""
    qtype = gguf.GGMLQuantizationType[kind]
    for number in (0x00, 0xFF, 0x80, 0x7F):
        blocks = random_blocks(kind, 32, 512)[0].copy()
        weights_per_block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
        view = blocks.reshape(32, 512 // weights_per_block, block_bytes)
        first = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4, "Q5_0": 2, "Q5_1": 4, "Q4_K": 16, "Q5_K": 16, "Q6_K": 0}[kind]
        view[:, :, first : 192 if kind == "Q6_K" else None] = number
        weight = torch.from_numpy(gguf.dequantize(blocks, qtype))
        for x in (torch.full((19, 512), 4.0), torch.full((19, 512), -4.0), torch.tensor([4.0, -4.0]).repeat(19, 256)):
            got = apply(_cpu.PackedLinear.from_gguf(blocks, kind, None, "int8"), x)  # type: ignore[arg-type]
            assert ((got.double() - x.double() @ weight.double().T).abs() <= rounding(x, weight)).all()


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_bit_identical_alone_and_in_every_batch_size(isa: str, kind: str, activations: Activations) -> None:
    packed, _ = pack(kind, 70, 512, activations)
    x = normal(310, 512)
    alone = torch.cat([apply(packed, x[i : i + 1]) for i in range(len(x))])
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 31, 32, 33, 95, 96, 97, 287, 288, 289, 310):
        assert torch.equal(apply(packed, x[:rows]), alone[:rows]), f"{rows} rows"


@relaxed
@given(data=st.data())
def test_rows_are_bit_identical_in_any_order_batch_and_thread_count(restored_threads: None, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    packed, _ = pack(kind, 70, 512, data.draw(st.sampled_from(("float", "int8"))))
    x = normal(130, 512)
    alone = torch.cat([apply(packed, x[i : i + 1]) for i in range(len(x))])
    order = torch.tensor(data.draw(st.lists(st.integers(0, 129), min_size=1, max_size=130)))
    _cpu.set_threads(data.draw(st.integers(1, 5)))
    assert torch.equal(apply(packed, x[order]), alone[order])


@pytest.mark.parametrize("kind", KINDS)
def test_fused_instruction_sets_agree_to_the_bit_on_int8(kind: str) -> None:
    fused = [name for name in ("amx", "avx512", "avx2") if name in _cpu.supported_isas()]
    if len(fused) < 2:
        pytest.skip("needs AVX-512 and AVX2")
    before = _cpu.isa()
    x, results = normal(52, 768), []
    for name in fused:
        _cpu.set_isa(name)  # type: ignore[arg-type]
        results.append(apply(pack(kind, 100, 768, "int8")[0], x))
    _cpu.set_isa(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_a_row_that_is_not_finite_fails_alone_and_zeros_give_zero(isa: str) -> None:
    packed, _ = pack("Q4_1", 40, 64, "int8")
    x = normal(20, 64)
    want = apply(packed, x)
    x[5, 3], x[6, 40] = float("nan"), float("inf")
    got = apply(packed, x)
    healthy = (torch.arange(20) != 5) & (torch.arange(20) != 6)
    assert got[5:7].isnan().all() and torch.equal(got[healthy], want[healthy])
    assert not apply(packed, torch.zeros(2, 64)).any() and not apply(packed, torch.full((2, 64), 1e-38)).any()


def test_float_weights_do_not_change_with_the_activations(isa: str) -> None:
    assert _cpu.PackedLinear(normal(8, 64)).activations == "float"


# ---- several weights as one linear


@pytest.mark.parametrize("rows", [1, 9, 100])
def test_concatenated_linears_answer_as_each_alone(isa: str, rows: int) -> None:
    """Formats, activations and sizes differ; the first part ends inside a panel."""
    parts = [
        pack("Q4_K", 45, 512, "int8")[0],
        pack("Q6_K", 64, 512, "float", normal(64, seed=8))[0],
        _cpu.PackedLinear(normal(7, 512, seed=3)),
    ]
    whole = _cpu.PackedLinear.concat(parts)
    assert (whole.out_features, whole.kind, whole.activations) == (116, "Q4_K+Q6_K+float32", "int8")
    assert whole.nbytes == sum(part.nbytes for part in parts)
    x = normal(rows, 512)
    assert torch.equal(apply(whole, x), torch.cat([apply(part, x) for part in parts], dim=1))
    gathered, single = torch.empty(2, 512), torch.empty(1, 512)
    whole.gather(torch.tensor([44, 45]), gathered)
    parts[0].gather(torch.tensor([44]), single)
    assert torch.equal(gathered[:1], single)
    parts[1].gather(torch.tensor([0]), single)
    assert torch.equal(gathered[1:], single)


@pytest.mark.parametrize("inner", [32, 45])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_a_gated_linear_of_two_parts_equals_its_two_halves(isa: str, inner: int, activations: Activations) -> None:
    gate, _ = pack("Q4_K", inner, 256, activations, normal(inner, seed=1))
    up, _ = pack("Q6_K", inner, 256, activations, seed=2)
    x, out = normal(20, 256), torch.empty(20, inner)
    _cpu.linear_gated(x, _cpu.PackedLinear.concat([gate, up]), out)
    torch.testing.assert_close(out, torch.nn.functional.silu(apply(gate, x)) * apply(up, x), rtol=1e-5, atol=1e-6)


def test_parts_of_different_instruction_sets_are_refused() -> None:
    one, best = _cpu.PackedLinear(normal(8, 8)), _cpu.isa()
    _cpu.set_isa("plain")
    other = _cpu.PackedLinear(normal(8, 8))
    _cpu.set_isa(best)
    if best == "plain":
        pytest.skip("there is only one")
    with pytest.raises(ValueError, match=f"linears packed for {best} and plain can not be concatenated"):
        _cpu.PackedLinear.concat([one, other])


def test_bytes_in_memory_are_those_of_the_file_but_for_the_widened_scales() -> None:
    per_256 = {"Q8_0": 272, "Q4_0": 144, "Q4_1": 160, "Q5_0": 176, "Q5_1": 192, "Q4_K": 148, "Q5_K": 180, "Q6_K": 210}
    for kind, count in per_256.items():
        assert pack(kind, 64, 512)[0].nbytes == 64 * 2 * count
