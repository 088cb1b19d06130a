"""Packed linears of the native CPU kernels: right in every storage format, and the same to the bit in every batch."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from twinplane.kernels import _cpu

QUANTIZED = ("Q8_0", "Q4_0", "Q4_1")
KINDS = ("float32", "bfloat16", *QUANTIZED)
# (out, in): panel and group borders, sizes that are no multiple of anything, a vocabulary that needs padding.
SHAPES = [(32, 32), (1, 1), (33, 577), (100, 96), (64, 320), (49, 31), (5, 1536)]
QUANTIZED_SHAPES = [(32, 32), (1, 32), (33, 576), (100, 96), (5, 1536)]
# Around every strip and tile size of every instruction set.
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 24, 25, 95, 96, 97, 287, 288, 289, 310]  # a panel product takes 288
relaxed = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pack(weight: Tensor, kind: str, bias: Tensor | None = None) -> tuple[_cpu.PackedLinear, Tensor]:
    """A packed linear and the exact weight it computes with, in float64."""
    if kind == "float32":
        return _cpu.PackedLinear(weight, bias), weight.double()
    if kind == "bfloat16":
        return _cpu.PackedLinear(weight.bfloat16(), bias), weight.bfloat16().double()
    qtype = gguf.GGMLQuantizationType[kind]
    blocks = gguf.quantize(weight.numpy(), qtype)
    return _cpu.PackedLinear.from_gguf(blocks, kind, bias), torch.from_numpy(gguf.dequantize(blocks, qtype)).double()


def apply(packed: _cpu.PackedLinear, x: Tensor, residual: Tensor | None = None, activation: str = "none") -> Tensor:
    out = torch.full((len(x), packed.out_features), float("nan"))
    packed(x, out, residual, activation)
    return out


def assert_close(got: Tensor, want: Tensor, in_features: int) -> None:
    """Rounding of a chain of `in_features` float32 additions of terms of size 1."""
    torch.testing.assert_close(got.double(), want, atol=1e-6 * (in_features + 10), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_equals_float64_on_the_stored_values_for_any_shape_and_number_of_rows(isa: str, kind: str) -> None:
    for out_features, in_features in QUANTIZED_SHAPES if kind in QUANTIZED else SHAPES:
        packed, exact = pack(normal(out_features, in_features), kind)
        for rows in (1, 3, 8, 13, 97):
            x = normal(rows, in_features, seed=rows)
            assert_close(apply(packed, x), x.double() @ exact.T, in_features)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_bit_identical_alone_and_in_every_batch_size(isa: str, kind: str) -> None:
    packed, _ = pack(normal(100, 576), kind)
    x = normal(max(ROWS), 576)
    alone = torch.cat([apply(packed, x[i : i + 1]) for i in range(len(x))])
    for rows in ROWS:
        assert torch.equal(apply(packed, x[:rows]), alone[:rows]), f"{rows} rows"


@relaxed
@given(data=st.data())
def test_rows_are_bit_identical_in_any_order_batch_and_thread_count(restored_threads: None, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    packed, _ = pack(normal(70, 320), kind)
    x = normal(130, 320)
    alone = torch.cat([apply(packed, x[i : i + 1]) for i in range(len(x))])
    order = torch.tensor(data.draw(st.lists(st.integers(0, 129), min_size=1, max_size=130)))
    _cpu.set_threads(data.draw(st.integers(1, 5)))
    assert torch.equal(apply(packed, x[order]), alone[order])


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e4, 1e30])
def test_bfloat16_weights_meet_float32_to_its_last_bit(isa: str, size: float) -> None:
    """The greatest error is that of float32 sums, whatever the size of x and of its neighbours, and by whatever unit it is multiplied."""
    packed, exact = pack(normal(64, 1000), "bfloat16")
    x = normal(37, 1000) * torch.logspace(-4, 4, 1000) * size / 1e4
    terms = x.double().abs() @ exact.abs().T
    error = (apply(packed, x).double() - x.double() @ exact.T).abs()
    assert (error <= 2.0**-24 * 64 * terms).all(), float((error / terms).max() * 2**24)


@pytest.mark.parametrize("rows", [1, 30])
def test_a_sum_of_nothing_is_the_bias(isa: str, rows: int) -> None:
    bias = normal(40)
    assert torch.equal(apply(_cpu.PackedLinear(torch.zeros(40, 0), bias), torch.zeros(rows, 0)), bias.expand(rows, 40))


def test_fused_instruction_sets_agree_to_the_bit() -> None:
    """Both run the same chain of fused multiply-adds, so results survive a change of machine between them."""
    if "avx512" not in _cpu.supported_isas():
        pytest.skip("needs AVX-512 and AVX2")
    before = _cpu.isa()
    x, results = normal(20, 576), []
    for name in ("avx512", "avx2"):
        _cpu.set_isa(name)
        results.append(apply(pack(normal(100, 576), "Q4_1")[0], x))
    _cpu.set_isa(before)
    assert torch.equal(*results)


def test_bias_activation_and_residual_are_applied_in_this_order(isa: str) -> None:
    weight, bias, x, residual = normal(45, 64), normal(45, seed=1), normal(14, 64, seed=2), normal(14, 45, seed=3)
    packed = _cpu.PackedLinear(weight, bias)
    plain = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    functions = {
        "none": lambda y: y,
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
    }
    for name, function in functions.items():
        assert_close(apply(packed, x, residual, name), function(plain) + residual.double(), 64)


def test_residual_may_be_updated_in_place(isa: str) -> None:
    packed, x, residual = _cpu.PackedLinear(normal(96, 300)), normal(130, 300), normal(130, 96)
    want = apply(packed, x, residual)
    packed(x, residual, residual)
    assert torch.equal(residual, want)


def test_rows_of_wider_arrays_are_read_and_written_in_place(isa: str) -> None:
    packed, wide = _cpu.PackedLinear(normal(40, 64)), normal(20, 100)
    out = torch.zeros(20, 80)
    packed(wide[:, 10:74], out[:, 20:60])
    assert torch.equal(out[:, 20:60], apply(packed, wide[:, 10:74].contiguous()))
    assert not out[:, :20].any() and not out[:, 60:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [32, 64, 45])  # 45: the halves do not begin on a panel border
def test_gated_linear_equals_its_two_halves(isa: str, kind: str, inner: int) -> None:
    packed, exact = pack(normal(2 * inner, 96), kind, normal(2 * inner, seed=5))
    for rows in (1, 5, 100):
        x = normal(rows, 96, seed=rows)
        both = x.double() @ exact.T + normal(2 * inner, seed=5).double()
        out = torch.empty(rows, inner)
        _cpu.linear_gated(x, packed, out)
        assert_close(out, torch.nn.functional.silu(both[:, :inner]) * both[:, inner:], 960)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantizer_and_embedding_rows_equal_ggufs(isa: str, kind: str) -> None:
    weight = normal(70, 64)
    weight[3] = 0  # a block without a scale
    packed, exact = pack(weight, kind)
    ids = torch.tensor([0, 69, 3, 33, 33, 17])
    for linear in (packed, _cpu.PackedLinear.quantize(weight, kind)):
        rows = torch.empty(len(ids), 64)
        linear.gather(ids, rows)
        assert torch.equal(rows.double(), exact[ids])


def test_embedding_rows_of_float_weights_are_the_weights(isa: str) -> None:
    weight, out = normal(70, 33), torch.empty(2, 33)
    _cpu.PackedLinear(weight).gather(np.array([69, 0], np.int32), out.numpy())
    assert torch.equal(out, weight[[69, 0]])
    _cpu.PackedLinear(weight, dtype="bfloat16").gather(torch.tensor([5, 64]), out)
    assert torch.equal(out, weight[[5, 64]].bfloat16().float())


def test_a_row_with_nan_fails_alone(isa: str) -> None:
    packed, x = _cpu.PackedLinear(normal(40, 64)), normal(14, 64)
    want = apply(packed, x)
    x[5, 3] = float("nan")
    got = apply(packed, x)
    healthy = torch.arange(14) != 5
    assert got[5].isnan().all() and torch.equal(got[healthy], want[healthy])


def test_a_packed_linear_keeps_the_instruction_set_it_was_packed_for() -> None:
    weight, x, best = normal(70, 64), normal(5, 64), _cpu.isa()
    packed = _cpu.PackedLinear(weight)
    want = apply(packed, x)
    _cpu.set_isa("plain")
    try:
        assert packed.isa == best
        assert torch.equal(apply(packed, x), want)
    finally:
        _cpu.set_isa(best)


def test_sizes_are_reported() -> None:
    packed = _cpu.PackedLinear.quantize(normal(64, 64), "Q4_1")
    assert (packed.out_features, packed.in_features, packed.kind, packed.nbytes) == (64, 64, "Q4_1", 64 * 64 // 32 * 20)


def test_denormals_count_as_zero_inside_and_the_callers_mode_is_left_alone(isa: str) -> None:
    """Each would cost the processor a hundred cycles, and the tail of a softmax is full of them."""
    tiny = torch.full((30, 64), 1e-40)
    assert not apply(_cpu.PackedLinear(normal(40, 64)), tiny).any()
    assert (tiny * 2 > 0).all() and tiny.numpy().astype(np.float64).min() > 0


def test_no_rows_are_no_work() -> None:
    packed = _cpu.PackedLinear(normal(8, 8))
    assert apply(packed, torch.empty(0, 8)).shape == (0, 8)
