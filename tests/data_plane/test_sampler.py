"""The sampler against its definition in kernels/reference.py, at the edges, and row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from draw_oracle import Filters, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from planner import CAPACITIES, StepBuilder
from twinplane.data_plane.rows import Rows, StepError
from twinplane.data_plane.sampler import Sampler
from twinplane.data_plane.step import StepView
from twinplane.kernels import reference, registry
from twinplane.shared.wire import CANDIDATE, RESULT_ENTRY, ExtraKind, ResultFlag, RowFlag, StepSlotLayout

VOCAB = 300
GREEDY, LOGPROBS = int(RowFlag.GREEDY), int(RowFlag.LOGPROBS)


class Bench:
    """Rows filled through real step bytes, and one call of the sampler over some of them."""

    def __init__(self, vocab: int = VOCAB, kernels: str | None = None) -> None:
        self.rows = Rows(CAPACITIES, block_size=16, max_model_len=256, num_blocks=64, vocab_size=vocab)
        self._sampler = Sampler(self.rows, registry.select("cpu", kernels))

    def open(self, row: int, extras: dict[ExtraKind, list[int]] | None = None, **params: Any) -> None:
        step = StepBuilder(0)
        step.open(row, **params)
        for kind, words in (extras or {}).items():
            step.extra(row, kind, words)
        self.rows.apply(StepView(step.build(), StepSlotLayout(CAPACITIES)))

    def sample(self, logits: np.ndarray, rows: list[int], positions: list[int]) -> np.ndarray:
        return self.candidates(logits, rows, positions)[0]

    def candidates(self, logits: np.ndarray, rows: list[int], positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Entries, and the candidates of all rows."""
        sampled = self._sampler.sample(torch.from_numpy(logits.copy()), rows, positions)
        return np.array(sampled.entries, dtype=RESULT_ENTRY), np.array(sampled.candidates, dtype=CANDIDATE)

    def one(self, logits: np.ndarray, position: int = 5, extras: dict[ExtraKind, list[int]] | None = None, **params: Any) -> np.void:
        self.open(3, extras, **params)
        return self.sample(logits[None], [3], [position])[0]


def random_logits(*shape: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


def float_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


# ---------------------------------------------------------------------------------------------- draws


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.1, 1.0, 4.0, 20.0]),
    levels=st.sampled_from([0, 7]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 80, VOCAB, VOCAB + 1]),
    top_p=st.sampled_from([0.0, 1e-4, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    u=st.floats(0, 1, exclude_max=True),
)
def test_the_oracle_of_the_draw_equals_its_definition(seed, spread, levels, temperature, top_k, top_p, min_p, u):
    """Equal, or `u` (or a filter) falls within rounding of the boundary between neighbours of the order."""
    logits = random_logits(VOCAB, seed=seed, spread=spread)
    if levels:
        logits = np.round(logits * levels) / levels  # many ties
    got = draw(logits, Filters(temperature, top_k, top_p, min_p), u)
    wide = torch.from_numpy(logits).double()
    candidates = {
        reference.draw(
            *reference.kept_tokens(wide, temperature, top_k, top_p + d, min(max(min_p - d, 0.0), 1.0)), min(max(u + e, 0.0), 1.0)
        )
        for d in (0.0, 1e-6, -1e-6)
        for e in (0.0, 1e-6, -1e-6)
    }
    assert got in candidates


FILTERS = [
    {},
    {"temperature": 0.7},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 200, "top_p": 0.95, "min_p": 0.01, "temperature": 1.3},
]


@pytest.mark.parametrize("vocab", [300, 49_152])
@pytest.mark.parametrize("spread", [0.5, 3.0])
@pytest.mark.parametrize("kernels", [None, "reference"])
def test_a_batch_draws_what_the_oracle_draws_row_by_row(vocab, spread, kernels):
    """Of the oracle's choice at the uniform, and a hair's breadth beside it: sums round differently."""
    bench = Bench(vocab, kernels)
    logits = random_logits(len(FILTERS), vocab, seed=vocab, spread=spread)
    for row, filters in enumerate(FILTERS):
        bench.open(row, seed=row, **filters)
    for position in range(2 if kernels else 40):
        rows = list(range(len(FILTERS)))
        got = bench.sample(logits, rows, [position] * len(rows))["token"].tolist()
        for row, cut in enumerate(FILTERS):
            filters = Filters(cut.get("temperature", 1.0), cut.get("top_k", 0), cut.get("top_p", 1.0), cut.get("min_p", 0.0))
            u = reference.uniform(row, 0, position)
            assert got[row] in {draw(logits[row], filters, min(max(u + e, 0.0), 1.0)) for e in (0.0, 1e-6, -1e-6)}


def test_B05_a_draw_is_the_same_to_the_bit_alone_and_in_any_batch():
    logits = random_logits(64, 2000)
    bench = Bench(2000)
    for row in range(16):
        bench.open(row, seed=row, flags=LOGPROBS, **FILTERS[row % len(FILTERS)])
    rows = [row % 16 for row in range(64)]
    together = bench.sample(logits, rows, list(range(64)))
    alone = [bench.sample(logits[i][None], [rows[i]], [i])[0] for i in range(64)]
    assert [entry.tobytes() for entry in together] == [entry.tobytes() for entry in alone]


def test_draws_follow_the_distribution():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    bench = Bench(vocab=4)
    bench.open(0, seed=7)
    entries = bench.sample(np.tile(logits, (4000, 1)), [0] * 4000, list(range(4000)))
    share = np.bincount(entries["token"], minlength=4) / 4000
    assert np.abs(share - [0.5, 0.3, 0.15, 0.05]).max() < 0.03


# --------------------------------------------------------------------------------------- neighbours


def mixed_rows(bench: Bench) -> None:
    bench.open(0, flags=GREEDY)
    bench.open(1, seed=1, top_k=5)
    bench.open(2, {ExtraKind.PROMPT_HISTORY: [1, 2, 3]}, seed=2, repetition_penalty=2.0)
    bench.open(4, {ExtraKind.OUTPUT_HISTORY: [9, 9, 8]}, seed=3, frequency_penalty=1.0, flags=LOGPROBS)
    bench.open(5, {ExtraKind.SUPPRESSED_TOKENS: [20, 2, 7]}, seed=4)
    bench.open(6, {ExtraKind.LOGIT_BIAS: [11, float_bits(5.0), 12, float_bits(-100.0)]}, seed=5, temperature=0.7)
    bench.open(7, {ExtraKind.ALLOWED_TOKENS: list(range(50, 90))}, seed=6, top_p=0.9, flags=LOGPROBS)


@pytest.mark.parametrize("rotation", range(7))
def test_B05_each_row_gets_what_it_would_get_alone_whatever_the_order(rotation):
    rows = [0, 1, 2, 4, 5, 6, 7]
    logits = random_logits(8, VOCAB)
    alone = {}
    for row in rows:
        bench = Bench()
        mixed_rows(bench)
        alone[row] = bench.sample(logits[row][None], [row], [10 + row])[0]
    order = rows[rotation:] + rows[:rotation]
    bench = Bench()
    mixed_rows(bench)
    together = bench.sample(logits[order], order, [10 + row for row in order])
    assert [entry.tobytes() for entry in together] == [alone[row].tobytes() for row in order]


def test_B01_a_seeded_row_draws_the_same_tokens_alone_late_and_in_another_row():
    logits = random_logits(32, VOCAB)
    alone, crowd = Bench(), Bench()
    alone.open(3, seed=42, temperature=0.8)
    expected = [int(alone.sample(logits[p][None], [3], [p])[0]["token"]) for p in range(32)]
    for row in range(8):
        crowd.open(row, seed=42 if row == 6 else row, temperature=0.8)
    got = []
    for p in range(32):
        rows = [6, 0, 1] if p % 2 else [5, 7, 2, 6]
        got.append(int(crowd.sample(np.stack([logits[p]] * len(rows)), rows, [p] * len(rows))[rows.index(6)]["token"]))
    assert got == expected
    assert len(set(expected)) > 10


def test_B05_a_row_opened_again_has_nothing_of_its_former_sequence():
    logits = random_logits(VOCAB)
    fresh = Bench().one(logits, flags=GREEDY)
    bench = Bench()
    bench.one(logits, extras={ExtraKind.LOGIT_BIAS: [5, float_bits(100.0)], ExtraKind.PROMPT_HISTORY: [1]}, repetition_penalty=1.5)
    assert bench.one(logits, flags=GREEDY).tobytes() == fresh.tobytes()


# --------------------------------------------------------------------------------------------- edges


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-38, 1e-45])
@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.1}])
def test_B03_tiny_temperatures_choose_the_greedy_token_with_finite_logprobs(temperature, filters):
    logits = random_logits(VOCAB, spread=10.0)
    with np.errstate(all="raise", under="ignore"):
        entry = Bench().one(logits, temperature=temperature, flags=LOGPROBS, **filters)
    assert int(entry["token"]) == int(logits.argmax())
    assert np.isfinite(entry["logprob"]) and entry["rank"] == 1 and entry["flags"] == 0


@pytest.mark.parametrize(
    "off", [{"top_k": 0}, {"top_k": VOCAB}, {"top_k": VOCAB + 1}, {"top_k": 10_000_000}, {"top_p": 1.0}, {"min_p": 0.0}]
)
def test_B04_filters_that_are_off_change_nothing(off):
    for seed in range(20):
        logits = random_logits(VOCAB, seed=seed)
        assert Bench().one(logits, seed=seed, **off)["token"] == Bench().one(logits, seed=seed)["token"]


@pytest.mark.parametrize("only_best", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-4}, {"min_p": 1.0}])
def test_B04_filters_at_their_tightest_leave_the_most_likely_token(only_best):
    for seed in range(20):
        logits = random_logits(VOCAB, seed=seed)
        assert int(Bench().one(logits, seed=seed, **only_best)["token"]) == int(logits.argmax())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), "all -inf"])
@pytest.mark.parametrize("flags", [0, GREEDY, LOGPROBS])
def test_B07_a_row_that_is_not_finite_fails_alone(poison, flags):
    logits = random_logits(4, VOCAB)
    healthy = Bench()
    for row in range(4):
        healthy.open(row, seed=row, flags=flags)
    expected = healthy.sample(logits, [0, 1, 2, 3], [5] * 4)
    bad = logits.copy()
    bad[2, slice(None) if poison == "all -inf" else 17] = -np.inf if poison == "all -inf" else poison
    bench = Bench()
    for row in range(4):
        bench.open(row, seed=row, flags=flags)
    got = bench.sample(bad, [0, 1, 2, 3], [5] * 4)
    assert got["flags"].tolist() == [0, 0, ResultFlag.NOT_FINITE, 0]
    for row in (0, 1, 3):
        assert got[row].tobytes() == expected[row].tobytes()
    assert 0 <= bench.rows.last_token[2] < VOCAB  # a relay already on its way finds a valid id


def test_masked_tokens_are_no_fault_but_masking_all_is():
    logits = random_logits(VOCAB)
    logits[:-1] = -np.inf
    assert Bench().one(logits, flags=LOGPROBS)["flags"] == 0
    everything = {ExtraKind.ALLOWED_TOKENS: [4], ExtraKind.SUPPRESSED_TOKENS: [100, 4]}
    assert Bench().one(random_logits(VOCAB), extras=everything)["flags"] == ResultFlag.NOT_FINITE


# ----------------------------------------------------------------------------- edits and penalties


def test_edits_and_penalties_equal_their_definition_and_logprobs_are_taken_after_them():
    logits = random_logits(VOCAB)
    prompt, output = [1, 2, 3, 250], [3, 9, 9]
    extras = {
        ExtraKind.PROMPT_HISTORY: prompt,
        ExtraKind.OUTPUT_HISTORY: output,
        ExtraKind.LOGIT_BIAS: [9, float_bits(4.0), 30, float_bits(-2.5)],
        ExtraKind.SUPPRESSED_TOKENS: [50, 7, 8],
    }
    entry = Bench().one(
        logits, 20, extras, flags=LOGPROBS, seed=5, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.6, temperature=0.5
    )
    edited = reference.edit_logits(torch.from_numpy(logits).double(), {9: 4.0, 30: -2.5}, None, [7, 8])
    final = reference.penalize(edited, prompt, output, 1.3, 0.4, 0.6)
    token = reference.draw(*reference.kept_tokens(final, 0.5), reference.uniform(5, 0, 20))
    logprob, rank = reference.logprob_and_rank(final, token)
    assert (int(entry["token"]), int(entry["rank"])) == (token, rank)
    assert float(entry["logprob"]) == pytest.approx(logprob, abs=1e-4)


def test_tokens_sampled_in_the_session_count_as_output():
    bench = Bench()
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 10], logits[0, 11], logits[0, 12] = 3.0, 2.0, 1.0
    bench.open(0, flags=GREEDY, frequency_penalty=1.5)
    assert [int(bench.sample(logits, [0], [p])[0]["token"]) for p in range(4)] == [10, 11, 10, 12]


@pytest.mark.parametrize(("position", "token"), [(9, 1), (10, 0)])
def test_B09_suppressed_tokens_are_allowed_from_their_position_on(position, token):
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[0], logits[1] = 5.0, 4.0
    entry = Bench().one(logits, position, {ExtraKind.SUPPRESSED_TOKENS: [10, 0]}, flags=GREEDY)
    assert int(entry["token"]) == token


def test_allowed_tokens_shut_out_every_other():
    for seed in range(30):
        entry = Bench().one(random_logits(VOCAB, seed=seed), 1, {ExtraKind.ALLOWED_TOKENS: [5, 6, 200]}, seed=seed, temperature=5.0)
        assert int(entry["token"]) in (5, 6, 200)


def test_an_attachment_with_a_token_outside_the_vocabulary_is_named():
    with pytest.raises(StepError, match=r"row 3 names token 300, the vocabulary has 300"):
        Bench().one(random_logits(VOCAB), 1, {ExtraKind.ALLOWED_TOKENS: [5, 300]})


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[40, 7, 99]] = 2.0
    assert int(Bench().one(logits, flags=GREEDY)["token"]) == 7


# ---------------------------------------------------------------------------------------- candidates


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.05, 1.0, 8.0, 40.0]),
    levels=st.sampled_from([0, 3]),
    count=st.sampled_from([1, 2, 8, 32, VOCAB]),
)
def test_candidates_are_the_head_of_the_sorted_log_softmax(seed, spread, levels, count):
    logits = random_logits(VOCAB, seed=seed, spread=spread)
    if levels:
        logits = np.round(logits * levels) / levels  # many ties: lower ids come first
    bench = Bench()
    bench.open(3, flags=GREEDY, num_candidates=count)
    _, got = bench.candidates(logits[None], [3], [5])
    order = np.argsort(-logits, kind="stable")[:count]
    assert got["token"].tolist() == order.tolist()
    expected = torch.from_numpy(logits).double().log_softmax(-1).numpy()[order]
    np.testing.assert_allclose(got["logprob"], expected, rtol=1e-6, atol=2e-6)


def test_candidates_lie_in_the_order_of_the_entries_and_failed_rows_have_none():
    bench, logits = Bench(), random_logits(4, VOCAB)
    logits[1, 5] = np.nan
    for row, count in enumerate((3, 4, 0, 2)):
        bench.open(row, flags=GREEDY, num_candidates=count)
    entries, got = bench.candidates(logits, [0, 1, 2, 3], [5] * 4)
    assert entries["flags"].tolist() == [0, ResultFlag.NOT_FINITE, 0, 0]
    expected = [*np.argsort(-logits[0], kind="stable")[:3], *np.argsort(-logits[3], kind="stable")[:2]]
    assert got["token"].tolist() == expected


def test_candidates_are_of_the_edited_and_penalized_distribution_and_agree_with_the_chosen_token():
    bench, logits = Bench(), random_logits(VOCAB)
    best = int(logits.argmax())
    extras = {ExtraKind.SUPPRESSED_TOKENS: [50, best], ExtraKind.OUTPUT_HISTORY: [9, 9], ExtraKind.LOGIT_BIAS: [9, float_bits(30.0)]}
    bench.open(0, extras, flags=GREEDY | LOGPROBS, num_candidates=VOCAB, frequency_penalty=2.0, temperature=0.1)
    entries, got = bench.candidates(logits[None], [0], [5])
    final = reference.penalize(reference.edit_logits(torch.from_numpy(logits).double(), {9: 30.0}, None, [best]), [], [9, 9], 1.0, 0.0, 2.0)
    np.testing.assert_allclose(got["logprob"], final.log_softmax(-1).numpy()[got["token"]], atol=2e-5)
    assert int(got["token"][-1]) == best and got["logprob"][-1] == -np.inf
    assert (got["token"][0], got["logprob"][0]) == (entries["token"][0], entries["logprob"][0])


def test_more_candidates_than_tokens_are_refused():
    with pytest.raises(StepError, match=r"wants 301 candidates, the vocabulary has 300"):
        Bench().open(0, num_candidates=301)
