"""Drawing of the native CPU kernels against its definition in the reference, at the edges, and row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from twinplane.kernels import _cpu, reference
from twinplane.kernels.cpu import ops

VOCABS = [1, 15, 16, 63, 64, 65, 300]


def normal(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def sample(
    logits: Tensor, uniforms: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    rows = len(uniforms)
    columns = (torch.full((rows,), value) for value in (top_p, min_p))
    return ops.sample(  # type: ignore[no-any-return]
        logits, torch.full((rows,), temperature), torch.full((rows,), top_k, dtype=torch.int64), *columns, torch.tensor(uniforms)
    ).tolist()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    vocab=st.sampled_from(VOCABS),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.1, 1.0, 4.0, 20.0]),
    levels=st.sampled_from([0, 7]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 80, 300, 10_000]),
    top_p=st.sampled_from([0.0, 1e-4, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    u=st.integers(0, 2**24 - 1),
)
def test_a_draw_equals_its_definition(
    isa: str, vocab: int, seed: int, spread: float, levels: int, temperature: float, top_k: int, top_p: float, min_p: float, u: int
) -> None:
    """Equal, or `u` (or a filter) falls within rounding of a boundary between neighbours of the order."""
    logits = normal(1, vocab, seed=seed, spread=spread)
    if levels:
        logits = (logits * levels).round() / levels  # many ties
    uniform = u * 2.0**-24
    (got,) = sample(logits, [uniform], temperature, top_k, top_p, min_p)
    wide = logits[0].double()
    allowed = []
    for d in (0.0, 1e-6, -1e-6):
        ids, weights = reference.kept_tokens(wide, temperature, top_k, top_p + d, min(max(min_p - d, 0.0), 1.0))
        first, last = (reference.draw(ids, weights, min(max(uniform + e, 0.0), 1.0)) for e in (-1e-6, 1e-6))
        order = ids.tolist()
        allowed += order[order.index(first) : order.index(last) + 1]  # between them may lie several tokens of little weight
    assert got in allowed


@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.01}, {"temperature": 30.0}])
def test_a_row_is_drawn_alike_alone_and_in_a_batch(isa: str, filters: dict[str, float]) -> None:
    logits = normal(50, 1000)
    uniforms = [i / 50 for i in range(50)]
    together = sample(logits, uniforms, **filters)  # type: ignore[arg-type]
    assert together == [sample(logits[i : i + 1], uniforms[i : i + 1], **filters)[0] for i in range(50)]  # type: ignore[arg-type]
    assert len(set(together)) > 5


def test_equal_logits_are_drawn_by_id(isa: str) -> None:
    logits = torch.zeros(1, 200)
    assert [sample(logits, [(i + 0.5) / 200])[0] for i in range(200)] == list(range(200))


@pytest.mark.parametrize("filters", [{}, {"top_k": 150}, {"top_p": 0.9999999}, {"min_p": 1e-30}])
@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 1.0, 100.0])
def test_masked_tokens_are_never_drawn(isa: str, filters: dict[str, float], temperature: float) -> None:
    logits = torch.full((1, 200), -torch.inf)
    logits[0, [3, 70, 199]] = torch.tensor([0.0, -1.0, -0.5])
    for u in (0.0, 0.5, 1 - 2.0**-24):
        assert sample(logits, [u], temperature, **filters)[0] in (3, 70, 199)  # type: ignore[arg-type]
    assert sample(logits, [1 - 2.0**-24], 1.0, **filters) == [70]  # type: ignore[arg-type]


@pytest.mark.parametrize("peak", [-1e30, -1e4, 0.0, 1e4, 1e30])
@pytest.mark.parametrize("top_k", [0, 2])
def test_it_is_differences_of_logits_that_count(isa: str, peak: float, top_k: int) -> None:
    logits = torch.full((1, 100), peak - max(abs(peak), 200.0))
    logits[0, 40] = peak
    assert sample(logits, [0.999], top_k=top_k) == [40]


def test_rows_that_can_not_be_sampled_are_marked_and_those_alone(isa: str) -> None:
    logits = normal(5, 70)
    logits[1, 3], logits[2, 69], logits[3] = torch.nan, torch.inf, -torch.inf
    got = sample(logits, [0.5] * 5)
    assert got[1:4] == [-1, -1, -1]
    assert [got[0], got[4]] == sample(logits[[0, 4]], [0.5] * 2)


def test_arguments_are_checked() -> None:
    logits, column, counts, out = normal(2, 5), torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    for arguments, message in (
        ((logits.double(), column, counts, column, column, column, out), "^logits must be float32"),
        ((logits, torch.ones(3), counts, column, column, column, out), "^temperature must be"),
        ((logits, column, column, column, column, column, out), "^top_k must be int64"),
        ((logits, column, counts, column, column, column.double(), out), "^uniforms must be float32"),
        ((logits, column, counts, column, column, column, counts), "^out must be int32"),
        ((torch.zeros(2, 0), column, counts, column, column, column, out), "^logits has no columns"),
    ):
        with pytest.raises(ValueError, match=message):
            _cpu.sample(*arguments)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31)), min_size=1, max_size=8))
def test_uniforms_equal_their_definition_exactly(keys: list[tuple[int, int, int]]) -> None:
    seeds = torch.tensor([seed - (seed >> 63 << 64) for seed, _, _ in keys])
    others = (torch.tensor([key[i] for key in keys]) for i in (1, 2))
    assert ops.uniforms(seeds, *others).tolist() == [reference.uniform(*key) for key in keys]
