"""Norms, rotation, activations and argmax of the native CPU kernels against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twinplane.kernels import _cpu, reference
from twinplane.kernels.cpu import ops

DIMS = [1, 7, 16, 17, 64, 100, 576]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dim", DIMS)
def test_norms_equal_the_reference(isa: str, dim: int) -> None:
    x, residual, weight, bias = normal(70, dim), normal(70, dim, seed=1), normal(dim, seed=2), normal(dim, seed=3)
    assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))
    want, total = reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    got, got_total = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert_close(got, want)
    assert_close(got_total, total)
    assert_close(ops.layer_norm(x, weight, bias, 1e-5), torch.nn.functional.layer_norm(x.double(), (dim,), weight.double(), bias.double()))


def test_a_norm_of_a_row_does_not_depend_on_the_rows_beside_it(isa: str) -> None:
    x, weight = normal(300, 576), normal(576, seed=1)
    together = ops.rms_norm(x, weight, 1e-5)
    assert all(torch.equal(ops.rms_norm(x[i : i + 1], weight, 1e-5), together[i : i + 1]) for i in range(0, 300, 37))


@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (64, 32), (80, 80), (6, 6), (128, 100)])
def test_rotation_equals_the_reference_and_leaves_the_rest(isa: str, dim: int, rotated: int) -> None:
    x = normal(9, 3, dim)
    cos, sin = reference.rope_cos_sin(torch.arange(100, 109), 10000.0 ** -(torch.arange(rotated // 2).double() / (rotated // 2)))
    got = ops.rope(x, cos.float(), sin.float())
    assert_close(got, reference.rope(x.double(), cos.float(), sin.float()))
    assert torch.equal(got[..., rotated:], x[..., rotated:])


@pytest.mark.parametrize("dim", [2, 30, 32, 34, 3072])
def test_gated_activations_equal_the_reference(isa: str, dim: int) -> None:
    x = normal(11, dim) * 4
    assert_close(ops.silu_mul(x), reference.silu_mul(x.double()))
    assert_close(ops.gelu_mul(x), reference.gelu_mul(x.double()))


def test_activations_are_finite_at_the_ends_of_the_range(isa: str) -> None:
    x = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30] * 3, [1.0] * 21]).reshape(1, 42)
    assert_close(ops.silu_mul(x), reference.silu_mul(x.double()))
    assert ops.gelu_mul(x.clamp(-1e10, 1e10)).isfinite().all()


def test_argmax_takes_the_lowest_index_among_equals(isa: str) -> None:
    logits = normal(6, 1000)
    logits[0, [3, 700]] = 50
    logits[1, 999] = 60
    logits[2] = -5
    assert ops.argmax(logits).tolist() == logits.argmax(-1).tolist()
    assert ops.argmax(logits)[:3].tolist() == [3, 999, 0]


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1000])
def test_argmax_marks_rows_without_a_finite_greatest_value_and_only_those(isa: str, vocab: int) -> None:
    logits = normal(6, vocab)
    logits[1, vocab // 2] = float("nan")
    logits[2] = float("-inf")
    logits[4, vocab - 1] = float("inf")
    logits[5, 0] = float("-inf")
    want = [-1 if i in (1, 2, 4) or (i == 5 and vocab == 1) else int(logits[i].argmax()) for i in range(6)]
    assert ops.argmax(logits).tolist() == want


def test_argmax_of_a_row_of_wider_logits_ignores_what_lies_beyond(isa: str) -> None:
    wide = normal(4, 40)
    wide[:, 30:] = float("nan")
    out = torch.empty(4, dtype=torch.int32)
    _cpu.argmax(wide[:, :30], out)
    assert out.tolist() == wide[:, :30].argmax(-1).tolist()
