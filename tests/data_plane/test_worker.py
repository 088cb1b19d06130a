"""The step loop: order of a step's parts, relay, phases, results, and what happens when a step fails."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
from planner import CAPACITIES, MemoryRings, Planner, Request, Result, StepBuilder, run_step
from tiny_models import NATIVE, Served, prompts
from twinplane.data_plane.worker import StepFailedError
from twinplane.shared.wire import NO_TOKEN, ExtraKind, Phase, ResultFlag, RowFlag, StepStatus

GREEDY = int(RowFlag.GREEDY)
POISON = 17  # the token whose embedding is NaN in `poisoned`


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Served:
    return Served(tiny_models.save(tiny_models.make(NATIVE["llama"]()), tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> Served:
    model = tiny_models.make(NATIVE["llama"]())
    model.model.embed_tokens.weight.data[POISON] = float("nan")
    return Served(tiny_models.save(model, tmp_path_factory.mktemp("poisoned")))


def first_step(row: int = 0, tokens: tuple[int, ...] = (5, 6, 7), **params) -> StepBuilder:
    step = StepBuilder(0, writes=[(row, 0, 3)])
    step.open(row, **{"flags": GREEDY, **params})
    step.sequence(row, 0, list(tokens), samples=True)
    return step


def test_a_step_without_sequences_is_answered_with_an_empty_result(served):
    worker, rings = served.session()
    result = run_step(worker, rings, StepBuilder(0, closes=[3]))
    header = result.header
    assert (int(header["step"]), int(header["status"]), int(header["last"]), len(result.entries)) == (0, StepStatus.OK, 1, 0)


def test_a_result_names_its_step_its_row_and_plausible_times(served):
    worker, rings = served.session()
    run_step(worker, rings, first_step(row=4))
    step = StepBuilder(1)
    step.sequence(4, 3, [9], samples=True)
    header = run_step(worker, rings, step).header
    assert int(header["step"]) == 1 and int(header["num_entries"]) == 1
    assert header["finished_ns"] >= header["received_ns"] + 1000 * (header["forward_us"] + header["sample_us"])
    assert header["forward_us"] > 0


def test_phases_follow_the_step(served):
    worker, rings = served.session()
    run_step(worker, rings, first_step())
    seen = [Phase(p) for p in rings.phases]
    assert seen == [Phase.IDLE, Phase.PUBLISH, Phase.APPLY, Phase.FORWARD, Phase.SAMPLE, Phase.PUBLISH, Phase.STOPPED]


def test_a_chunk_that_does_not_sample_yields_no_entry(served):
    worker, rings = served.session()
    step = StepBuilder(0, writes=[(0, 0, 3)])
    step.open(0, flags=GREEDY)
    step.sequence(0, 0, [5, 6, 7], samples=False)
    assert len(run_step(worker, rings, step).entries) == 0


def test_a_relayed_input_is_the_token_the_row_sampled_last(served):
    answers = []
    for relay in (True, False):
        worker, rings = served.session()
        token = int(run_step(worker, rings, first_step()).entries[0]["token"])
        step = StepBuilder(1)
        step.sequence(0, 3, [NO_TOKEN if relay else token], samples=True)
        answers.append(int(run_step(worker, rings, step).entries[0]["token"]))
    assert answers[0] == answers[1]


def test_two_steps_in_flight_are_served_in_order(served):
    worker, rings = served.session()
    second = StepBuilder(1)
    second.sequence(0, 3, [NO_TOKEN], samples=True)
    rings.steps.extend([first_step().build(), second.build()])
    worker.run(lambda: len(rings.results) == 2)
    assert [int(Result.parse(r).header["step"]) for r in rings.results] == [0, 1]


def test_a_row_can_be_closed_and_opened_in_one_step(served):
    worker, rings = served.session()
    fresh = int(run_step(*served.session(), first_step()).entries[0]["token"])
    biased = first_step(tokens=(9,))
    biased.extra(0, ExtraKind.ALLOWED_TOKENS, [42])
    assert int(run_step(worker, rings, biased).entries[0]["token"]) == 42
    again = first_step()
    again.step, again.closes = 1, [0]
    assert int(run_step(worker, rings, again).entries[0]["token"]) == fresh


def test_decodes_and_chunks_share_a_step_without_disturbing_each_other(served):
    texts = ((5, 6, 7), (30, 31, 32, 33, 34))
    alone = [int(run_step(*served.session(), first_step(tokens=tokens)).entries[0]["token"]) for tokens in texts]
    worker, rings = served.session()
    step = StepBuilder(0, writes=[(2, 0, 9), (7, 0, 1)])
    step.open(2, flags=GREEDY)
    step.open(7, flags=GREEDY)
    step.sequence(7, 0, [30, 31, 32, 33, 34], samples=True)
    step.sequence(2, 0, [5, 6, 7], samples=True)
    entries = run_step(worker, rings, step).entries
    assert [(int(e["row"]), int(e["token"])) for e in entries] == [(7, alone[1]), (2, alone[0])]


def test_candidates_travel_in_the_result_and_a_result_without_room_for_them_fails_the_step(served):
    worker, rings = served.session()
    result = run_step(worker, rings, first_step(num_candidates=4))
    assert int(result.header["num_candidates"]) == len(result.candidates) == 4
    assert int(result.candidates["token"][0]) == int(result.entries[0]["token"])
    assert (np.diff(result.candidates["logprob"]) <= 0).all()
    later = StepBuilder(1)
    later.sequence(0, 3, [9], samples=False)
    assert len(run_step(worker, rings, later).candidates) == 0
    many = StepBuilder(2, closes=[0])
    for row in range(2):
        many.open(row, flags=GREEDY, num_candidates=CAPACITIES.max_candidates // 2 + 1)
        many.sequence(row, 0, [5], samples=True)
    rings.steps.append(many.build())
    with pytest.raises(StepFailedError, match=r"yields 258 candidates, a result has room for 256"):
        worker.run(lambda: False)


# ----------------------------------------------------------------------------------------------- faults


def test_B07_a_sequence_with_nan_fails_alone_and_the_others_are_bit_equal(poisoned):
    def answers(with_bad: bool) -> list[tuple[list[int], list[float]]]:
        worker, rings = poisoned.session()
        texts = [[t for t in p if t != POISON] for p in prompts((12, 30, 21))]
        healthy = [Request(t, 10, params={"flags": int(RowFlag.LOGPROBS), "seed": i, "temperature": 0.8}) for i, t in enumerate(texts)]
        bad = [Request([8, POISON, 9], 4, params={"flags": GREEDY})] if with_bad else []
        Planner(worker, rings, block_size=16, num_blocks=64, max_chunk=64).serve(healthy + bad)
        assert all(flag == ResultFlag.NOT_FINITE for request in bad for flag in request.flags)
        assert all(flag == 0 for request in healthy for flag in request.flags)
        return [(r.sampled, r.logprobs) for r in healthy]

    assert answers(False) == answers(True)  # tokens, and logprobs to the last bit


def test_B07_blocks_of_a_failed_sequence_do_not_poison_their_next_owner(poisoned):
    """Stale NaN keys and values behind the new owner's context must not be read, or not matter."""
    text = [t for t in prompts((20,))[0] if t != POISON]
    expected = int(run_step(*poisoned.session(), _prompt_in_blocks(text)).entries[0]["token"])
    worker, rings = poisoned.session()
    bad = run_step(worker, rings, _prompt_in_blocks([POISON] * 32))
    assert int(bad.entries[0]["flags"]) == ResultFlag.NOT_FINITE
    good = _prompt_in_blocks(text)
    good.step, good.closes = 1, [0]
    entry = run_step(worker, rings, good).entries[0]
    assert (int(entry["token"]), int(entry["flags"])) == (expected, 0)


def _prompt_in_blocks(text: list[int]) -> StepBuilder:
    step = StepBuilder(0, writes=[(0, 0, 11), (0, 1, 12)])
    step.open(0, flags=GREEDY)
    step.sequence(0, 0, text, samples=True)
    return step


FAULTS = {
    "block out of range": (lambda step: step.writes.append((0, 1, 64)), "block 64, the pool has 64"),
    "index out of range": (lambda step: step.writes.append((0, 99, 1)), "index 99, a row has 17 blocks"),
    "token out of range": (lambda step: step.tokens.__setitem__(1, 256), "input token 256, the vocabulary has 256"),
    "relay without a sample": (lambda step: step.tokens.__setitem__(1, NO_TOKEN), "input token -1"),
    "attachment cut off": (lambda step: step.extras.extend([0, 1, 5, 7]), "says 5 words, only 1 follow"),
    "unknown attachment": (lambda step: step.extras.extend([0, 77, 0]), "77 is not a valid ExtraKind"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_contradicts_the_protocol_is_published_as_failed_and_ends_the_loop(fault, served):
    change, message = FAULTS[fault]
    worker, rings = served.session()
    step = first_step()
    change(step)
    rings.steps.append(step.build())
    with pytest.raises(StepFailedError, match=message):
        worker.run(lambda: False)
    result = Result.parse(rings.results[-1])
    assert int(result.header["status"]) == StepStatus.FAILED and len(result.entries) == 0 and int(result.header["last"]) == 1


def test_a_model_that_raises_is_published_as_failed_with_the_cause_chained(served, monkeypatch):
    def explode(batch):
        raise RuntimeError("kernel exploded")

    monkeypatch.setattr(served.device, "forward", explode)
    worker, rings = served.session()
    rings.steps.append(first_step().build())
    with pytest.raises(StepFailedError, match=r"step 0 failed: RuntimeError: kernel exploded") as caught:
        worker.run(lambda: False)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert int(Result.parse(rings.results[-1]).header["status"]) == StepStatus.FAILED


def test_a_full_result_ring_does_not_keep_the_loop_from_stopping(served):
    class FullRings(MemoryRings):
        def result_slot(self, timeout_ns: int) -> None:
            return None

    _, _ = served.session()
    rings = FullRings(CAPACITIES)
    from twinplane.data_plane.worker import Worker

    worker = Worker(served.device, rings, block_size=16, num_blocks=64, max_model_len=256, vocab_size=256)
    rings.steps.append(first_step().build())
    asked = iter([False, False, True, True])
    worker.run(lambda: next(asked))
    assert rings.results == []


def test_grad_is_never_recorded(served, monkeypatch):
    worker, rings = served.session()
    forward, logits = served.device.forward, []
    monkeypatch.setattr(served.device, "forward", lambda batch: logits.append(forward(batch)) or logits[-1])
    run_step(worker, rings, first_step())
    assert not logits[0].requires_grad
