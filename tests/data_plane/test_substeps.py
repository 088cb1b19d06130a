"""Several tokens of one step: the same ones as from as many steps, published one by one, and cut short when asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny_models
from planner import MemoryRings, Result, StepBuilder, run_step, run_substeps
from tiny_models import FALLBACK, NATIVE, Served, prompts
from twinplane.data_plane.worker import StepFailedError, Worker
from twinplane.shared.wire import NO_TOKEN, ExtraKind, ResultFlag, RowFlag, StepStatus

POISON = 17  # the token whose embedding is NaN in `poisoned`
TEXTS = prompts((5, 37, 18))
BLOCKS_PER_ROW = 8  # of 16 tokens

# One kind of sampling for each row.
PARAMS: tuple[dict[str, Any], ...] = (
    {"flags": int(RowFlag.GREEDY | RowFlag.LOGPROBS)},
    {"flags": int(RowFlag.LOGPROBS), "seed": 5, "temperature": 0.9, "top_k": 40, "top_p": 0.95},
    {
        "flags": 0,
        "seed": 6,
        "stream": 2,
        "temperature": 1.1,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
    },
)


@pytest.fixture(scope="module", params=["llama", "mistral sliding window", "gpt2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    name = request.param
    model = tiny_models.make((NATIVE | FALLBACK)[name]())
    return Served(tiny_models.save(model, tmp_path_factory.mktemp("substeps")), block_size=16)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Served:
    model = tiny_models.make(NATIVE["llama"]())
    model.model.embed_tokens.weight.data[POISON] = float("nan")
    return Served(tiny_models.save(model, tmp_path_factory.mktemp("poisoned")), block_size=16)


def prefill(
    worker: Worker,
    rings: MemoryRings,
    *,
    limits: dict[int, int] | None = None,
    extras: Callable[[int], list[tuple[ExtraKind, list[int]]]] = lambda row: [],
) -> Result:
    """The first token of every row. ``limits``: tokens of a row's sequence; as many as its blocks hold, else."""
    step = StepBuilder(0)
    for row, (text, params) in enumerate(zip(TEXTS, PARAMS, strict=True)):
        step.open(row, limit=(limits or {}).get(row, 16 * BLOCKS_PER_ROW), **params)
        step.extra(row, ExtraKind.PROMPT_HISTORY, text)
        for kind, words in extras(row):
            step.extra(row, kind, words)
        step.writes += [(row, i, row * BLOCKS_PER_ROW + i) for i in range(BLOCKS_PER_ROW)]
        step.sequence(row, 0, text, samples=True)
    return run_step(worker, rings, step)


def decodes(number: int, done: int, substeps: int, rows: tuple[int, ...] = (0, 1, 2)) -> StepBuilder:
    """A relayed decode of each row after ``done`` decodes."""
    step = StepBuilder(number, substeps=substeps)
    for row in rows:
        step.sequence(row, len(TEXTS[row]) + done, [NO_TOKEN], samples=True)
    return step


def answers(served: Served, substeps: tuple[int, ...], **options: Any) -> list[tuple[int, int, float, int]]:
    """(row, token, logprob, rank) of all decodes, in steps of so many substeps."""
    worker, rings = served.session()
    results = [prefill(worker, rings, **options)]
    done = 0
    for number, count in enumerate(substeps, 1):
        results += run_substeps(worker, rings, decodes(number, done, count))
        done += count
    return [(int(e["row"]), int(e["token"]), float(e["logprob"]), int(e["rank"])) for result in results for e in result.entries]


def test_INV_10_substeps_give_the_tokens_of_as_many_steps_to_the_last_bit(served: Served) -> None:
    def extras(row: int) -> list[tuple[ExtraKind, list[int]]]:
        return [(ExtraKind.SUPPRESSED_TOKENS, [len(TEXTS[row]) + 9, *range(3, 130)])] if row != 1 else []

    one_by_one = answers(served, (1,) * 24, extras=extras)
    assert len(one_by_one) == 75
    for substeps in ((24,), (1, 2, 4, 8, 9), (3,) * 8):  # into new blocks, and past the end of the suppression
        assert answers(served, substeps, extras=extras) == one_by_one


def test_each_substep_is_published_when_it_is_done_and_the_last_one_says_so(served: Served) -> None:
    worker, rings = served.session()
    prefill(worker, rings)
    results = run_substeps(worker, rings, decodes(1, 0, 4))
    headers = [result.header for result in results]
    assert [(int(h["step"]), int(h["substep"]), int(h["last"])) for h in headers] == [(1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 3, 1)]
    assert len({int(h["received_ns"]) for h in headers}) == 1
    assert (np.diff([int(h["finished_ns"]) for h in headers]) > 0).all()
    assert all(len(result.entries) == 3 for result in results)


def test_a_row_that_ends_by_length_or_stop_token_is_computed_no_further(served: Served) -> None:
    everything = answers(served, (1,) * 12)
    tokens = [token for row, token, *_ in everything if row == 1]
    stop = tokens[4]
    early = tokens.index(stop)  # it may have come before; then its position must not count yet

    def extras(row: int) -> list[tuple[ExtraKind, list[int]]]:
        return [(ExtraKind.STOP_TOKENS, [len(TEXTS[1]) + 4, 300, stop])] if row == 1 else []

    worker, rings = served.session()
    prefill(worker, rings, limits={0: len(TEXTS[0]) + 4}, extras=extras)
    results = run_substeps(worker, rings, decodes(1, 0, 12))
    rows = [result.entries["row"].tolist() for result in results]
    assert early <= 4
    assert rows == [[0, 1, 2]] * 3 + [[1, 2]] + [[2]] * 8
    left = [(row, token) for row, token, *_ in everything[3:] if row == 2]
    assert [(int(e["row"]), int(e["token"])) for result in results for e in result.entries if e["row"] == 2] == left


def test_the_step_ends_when_every_row_has(served: Served) -> None:
    worker, rings = served.session()
    prefill(worker, rings, limits={row: len(TEXTS[row]) + 3 + row for row in range(3)})
    results = run_substeps(worker, rings, decodes(1, 0, 30))
    assert [len(result.entries) for result in results] == [3, 3, 2, 1]
    assert [int(result.header["last"]) for result in results] == [0, 0, 0, 1]


def test_the_stop_tokens_of_a_rows_last_owner_are_forgotten(served: Served) -> None:
    worker, rings = served.session()
    prefill(worker, rings, extras=lambda row: [(ExtraKind.STOP_TOKENS, [0, *range(256)])])
    assert len(run_substeps(worker, rings, decodes(1, 0, 4))) == 1
    again = StepBuilder(2, closes=[0])
    again.open(0, limit=100, **PARAMS[0])
    again.sequence(0, 0, TEXTS[0], samples=True)
    run_step(worker, rings, again)
    assert len(run_substeps(worker, rings, decodes(3, 0, 4, rows=(0,)))) == 4


def test_what_a_table_holds_beyond_the_context_is_never_read_or_written(served: Served) -> None:
    """Blocks taken ahead for a step that was cut short are another row's later; the entries stay until the row comes there."""
    worker, rings = served.session()
    prefill(worker, rings)
    step = decodes(1, 0, 1)
    step.writes = [(0, i, BLOCKS_PER_ROW + i % 3) for i in range(2, BLOCKS_PER_ROW)]  # row 1's own blocks
    results = run_substeps(worker, rings, step) + run_substeps(worker, rings, decodes(2, 1, 8))
    found = [(int(e["row"]), int(e["token"])) for result in results for e in result.entries]
    assert found == [(row, token) for row, token, *_ in answers(served, (1,) * 9)[3:]]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_interrupt_ends_the_step_with_the_substep_under_way(served: Served, after: int) -> None:
    worker, rings = served.session()
    prefill(worker, rings)
    rings.interrupt_after = lambda results: 2 if results >= after else 1  # 1: an older step's, which means nothing now
    results = run_substeps(worker, rings, decodes(1, 0, 8))
    assert [int(result.header["last"]) for result in results] == [0] * (after - 1) + [1]
    following = run_substeps(worker, rings, decodes(2, after, 2))
    assert len(following) == 2
    tokens = [(int(e["row"]), int(e["token"])) for result in results + following for e in result.entries]
    assert tokens == [(row, token) for row, token, *_ in answers(served, (1,) * (after + 2))[3:]]


def test_whoever_stops_the_loop_waits_for_a_substep_only(served: Served) -> None:
    worker, rings = served.session()
    prefill(worker, rings)
    rings.steps.append(decodes(1, 0, 8).build())
    worker.run(lambda: len(rings.results) >= 3)  # after two of the substeps; asked before the third is published
    assert [int(Result.parse(r).header["last"]) for r in rings.results[1:]] == [0, 0, 1]


def test_a_row_without_finite_logits_leaves_the_others_to_go_on(poisoned: Served) -> None:
    worker, rings = poisoned.session()
    prefill(worker, rings)
    step = StepBuilder(1, substeps=4)
    for row in range(3):
        step.sequence(row, len(TEXTS[row]), [POISON if row == 1 else 9], samples=True)
    results = run_substeps(worker, rings, step)
    assert [result.entries["row"].tolist() for result in results] == [[0, 1, 2]] + [[0, 2]] * 3
    assert results[0].entries["flags"].tolist() == [0, ResultFlag.NOT_FINITE, 0]


def test_a_substep_that_raises_fails_the_step_and_those_before_it_stay_published(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, rings = served.session()
    prefill(worker, rings)
    forward, calls = served.device.forward, iter(range(100))

    def third_explodes(batch: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("kernel exploded")
        return forward(batch)

    monkeypatch.setattr(served.device, "forward", third_explodes)
    rings.steps.append(decodes(1, 0, 4).build())
    with pytest.raises(StepFailedError, match="step 1 failed: RuntimeError: kernel exploded"):
        worker.run(lambda: False)
    headers = [Result.parse(r).header for r in rings.results[1:]]
    assert [int(h["status"]) for h in headers] == [StepStatus.OK, StepStatus.OK, StepStatus.FAILED]
    assert [int(h["last"]) for h in headers] == [0, 0, 1]


def test_a_step_of_several_substeps_with_a_chunk_is_refused(served: Served) -> None:
    worker, rings = served.session()
    prefill(worker, rings)
    step = decodes(1, 0, 4, rows=(0, 1))
    step.sequence(2, len(TEXTS[2]), [NO_TOKEN], samples=False)
    rings.steps.append(step.build())
    with pytest.raises(StepFailedError, match="4 substeps has 3 sequences, of which 3 are decodes"):
        worker.run(lambda: False)
