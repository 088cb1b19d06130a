"""Several tokens of one step (INV-12): when a step may have several substeps, what they give, and how it is cut short."""

from __future__ import annotations

import random

import pytest
from core_device import NAN_TOKEN, Request, Step, expected_output
from core_rig import STEP_NS, Rig
from twinplane.control_plane import _core


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    dice = random.Random(1000 + seed)
    return tuple(dice.randint(1, 49) for _ in range(length))


def sent_with_several(rig: Rig) -> Step:
    """Turns until a step of as many substeps as allowed has been sent; none of its results has been taken."""
    most = rig.settings["max_substeps"]
    for _ in range(200):
        step = rig.tick()
        if step is not None and step.num_substeps == most:
            return step
        if step is None or len(rig.device.in_flight) == rig.depth:
            rig.retire()
            rig.poll()
    raise AssertionError(f"no step of {most} substeps was sent: {[s.num_substeps for s in rig.steps]}")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_substeps_double_while_nobody_comes_and_none_has_more_than_the_longest_stream_needs(depth: int) -> None:
    rig = Rig(depth=depth, max_substeps=8)
    rig.submit(1, Request(prompt(5), max_tokens=40))
    rig.run()
    substeps = [step.num_substeps for step in rig.steps if len(step.seqs)]
    grown = [n for n in substeps if n > 1]  # those in flight behind each other count as well, so the first may have more than two
    assert grown[:-1] == sorted(grown[:-1]) and 8 in grown and (depth > 1 or grown[:3] == [2, 4, 8])
    assert sum(substeps) == 40
    assert rig.stats().results_taken == rig.stats().steps_retired + sum(n - 1 for n in substeps)


def test_by_default_every_step_gives_one_token() -> None:
    rig = Rig()
    rig.submit(1, Request(prompt(5), max_tokens=40))
    rig.run()
    assert {step.num_substeps for step in rig.steps} == {1}


def test_tokens_of_a_step_come_one_by_one() -> None:
    rig = Rig(max_substeps=8)
    rig.submit(1, Request(prompt(5), max_tokens=60))
    sent_with_several(rig)
    for _ in range(8):
        rig.retire()
        assert [len(event.tokens) for event in rig.poll()] == [1]
    assert rig.device.in_flight == []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_arrival_is_admitted_right_after_the_substep_under_way(depth: int) -> None:
    rig = Rig(depth=depth, max_substeps=8)
    rig.submit(1, Request(prompt(5), max_tokens=60))
    step = sent_with_several(rig)
    rig.retire()
    assert rig.tick() is None
    rig.submit(2, Request(prompt(6, 1), max_tokens=3))
    assert rig.scheduler.interrupted == step.number + 1
    assert rig.tick() is None, "nothing is sent before the step has ended"
    rig.retire()  # the substep under way
    assert rig.device.in_flight == []
    after = rig.tick()
    assert after is not None and after.num_substeps == 1 and len(after.opens) == 1 and len(after.seqs) == 2
    assert rig.stats().steps_interrupted == 1
    rig.run()


def test_an_interrupt_is_of_one_step_only() -> None:
    rig = Rig(max_substeps=4)
    rig.submit(1, Request(prompt(5), max_tokens=100))
    interrupted = sent_with_several(rig)
    rig.cancel(99)  # nobody: that is no reason
    assert rig.scheduler.interrupted == 0
    rig.submit(2, Request(prompt(5, 1), max_tokens=2))
    rig.retire()
    assert rig.scheduler.interrupted == interrupted.number + 1
    later = sent_with_several(rig)
    assert later.number >= rig.scheduler.interrupted
    for _ in range(4):
        rig.retire()
    assert rig.device.in_flight == []
    rig.run()


def test_INV_9_a_cancel_ends_the_step_and_frees_what_the_request_held() -> None:
    rig = Rig(max_substeps=8)
    for i in range(2):
        rig.submit(i, Request(prompt(5, i), max_tokens=60))
    sent_with_several(rig)
    rig.retire()
    assert rig.cancel(0)
    rig.retire()  # holds a token for nobody
    assert rig.device.in_flight == []
    assert rig.stats().blocks_fenced == 0
    rig.run()
    assert len(rig.records[1].tokens) == 60


def test_a_row_that_ends_is_computed_no_further_and_its_blocks_come_back_with_the_step() -> None:
    rig = Rig(max_substeps=8, block_size=2)
    rig.submit(0, Request(prompt(5), max_tokens=60))
    rig.submit(1, Request(prompt(5, 1), max_tokens=17))
    while not rig.records[1].finish:
        rig.turn()
    assert rig.device.in_flight and rig.stats().blocks_fenced > 0
    rows = {row for row, _ in rig.device._going_on}
    assert len(rows) == 1
    while rig.device.in_flight:
        rig.retire()
    assert rig.stats().blocks_fenced == 0
    rig.run()


def test_a_step_whose_rows_have_all_ended_ends() -> None:
    rig = Rig(max_substeps=8)
    request = Request(prompt(5), max_tokens=100)
    output = expected_output(request)[0]
    stop = next(token for i, token in enumerate(output) if i > 20 and output.index(token) == i)  # for the first time
    rig.submit(1, Request(prompt(5), max_tokens=100, stops=(stop,)))
    rig.run()
    assert rig.records[1].finish == _core.FINISH_STOP_TOKEN
    assert rig.records[1].tokens == output[: output.index(stop) + 1]


def test_a_row_without_finite_logits_ends_alone() -> None:
    rig = Rig(max_substeps=4)
    rig.submit(1, Request(prompt(5), max_tokens=40))
    rig.submit(2, Request((*prompt(4, 1), NAN_TOKEN)))
    rig.run()
    assert rig.records[2].finish == _core.FINISH_NOT_FINITE
    assert len(rig.records[1].tokens) == 40


@pytest.mark.parametrize("substeps", [1, 2, 4, 8])
@pytest.mark.parametrize("depth", [1, 2])
def test_INV_10_tokens_do_not_depend_on_the_substeps(substeps: int, depth: int) -> None:
    rig = Rig(num_blocks=100, depth=depth, max_substeps=substeps)  # Record.verify compares with a lone run
    for i in range(8):
        rig.submit(
            i,
            Request(
                prompt(3 + 4 * i, i),
                max_tokens=30 + i,
                eos=(2,),
                stops=(3, 4),
                min_tokens=5 * (i % 3),
                seed=i,
                logprobs=i % 2 == 0,
                frequency_penalty=0.5 * (i % 2),
                repetition_penalty=1 + i % 3,
            ),
        )
    rig.run()
    assert max(step.num_substeps for step in rig.steps) == substeps


def test_samples_of_a_group_decode_in_substeps_and_beams_do_not() -> None:
    rig = Rig(max_substeps=4)
    rig.submit(0, Request(prompt(9), n=3, seed=5, max_tokens=30))
    rig.run()
    assert max(step.num_substeps for step in rig.steps) == 4
    rig = Rig(max_substeps=4)
    rig.submit(0, Request(prompt(9), beam_width=3, max_tokens=20))
    rig.run()
    assert {step.num_substeps for step in rig.steps} == {1}


def test_nobody_yields_for_substeps_and_what_was_taken_ahead_is_given_back() -> None:
    rig = Rig(num_blocks=16, block_size=2, max_substeps=8, max_rows=2)
    for i in range(2):
        rig.submit(i, Request(prompt(4, i), max_tokens=12))
    rig.run()
    assert rig.stats().preemptions == 0

    rig = Rig(num_blocks=40, block_size=2, max_substeps=8)
    rig.submit(0, Request(prompt(4), max_tokens=40))
    sent_with_several(rig)
    ahead = rig.stats().blocks_referenced
    rig.submit(1, Request(prompt(3, 1), max_tokens=1))
    rig.retire()
    (sequence, *_) = rig.snapshot()["running"]
    assert len(sequence["blocks"]) == -(-sequence["num_tokens"] // 2) < ahead
    rig.run()


def test_substeps_shrink_where_blocks_are_short_and_take_little_of_the_cache() -> None:
    rig = Rig(num_blocks=32, block_size=2, max_substeps=16, max_rows=1)
    rig.submit(0, Request(prompt(50), max_tokens=2))
    rig.run()
    cached = rig.stats().blocks_cached
    assert cached >= 24
    rig.submit(1, Request(prompt(3, 1), max_tokens=16))
    rig.run()
    # Sixteen tokens take eight blocks, all of a cached one each once the free ones are gone.
    assert max(step.num_substeps for step in rig.steps) < 16
    assert rig.stats().preemptions == 0


def test_a_step_does_not_reach_over_a_deadline() -> None:
    rig = Rig(depth=1, max_substeps=8)
    rig.submit(1, Request(prompt(5), max_tokens=100, deadline_ns=rig.now + 40 * STEP_NS))
    while not rig.records[1].finish:
        assert rig.turn()
        step = rig.steps[-1]
        if rig.device.in_flight and step.num_substeps > 1 and rig.device.substeps_run == 1:
            assert rig.now + (step.num_substeps - 1) * STEP_NS <= rig.records[1].request.deadline_ns + STEP_NS
    assert rig.records[1].finish == _core.FINISH_DEADLINE
    assert max(step.num_substeps for step in rig.steps) > 1
    rig.run()


def test_a_deadline_that_passes_all_the_same_interrupts() -> None:
    rig = Rig(max_substeps=8)
    rig.submit(1, Request(prompt(5), max_tokens=100))
    rig.submit(2, Request(prompt(5, 1), max_tokens=100, deadline_ns=rig.now + 10**9))
    sent_with_several(rig)
    rig.now += 10**9
    assert rig.tick() is None
    rig.retire()
    rig.poll()
    assert rig.records[2].finish == _core.FINISH_DEADLINE and rig.device.in_flight == []
    rig.cancel(1)
    rig.run()


@pytest.mark.parametrize("step_failed", [False, True])
@pytest.mark.parametrize("results", [0, 1, 5])
def test_a_data_plane_lost_in_the_middle_of_a_step_costs_no_token(results: int, step_failed: bool) -> None:
    rig = Rig(max_substeps=8)
    for i in range(3):
        rig.submit(i, Request(prompt(5 + i, i), max_tokens=40, seed=i))
    sent_with_several(rig)
    for _ in range(results):
        rig.retire()
    rig.poll()
    before = [len(rig.records[i].tokens) for i in range(3)]
    rig.detach(step_failed=step_failed)
    assert [len(rig.records[i].tokens) for i in range(3)] == before
    rig.attach(num_blocks=64, block_size=4)
    rig.run()
    assert [len(rig.records[i].tokens) for i in range(3)] == [40] * 3


def test_a_result_takes_back_what_a_failed_step_counted_against_a_request() -> None:
    rig = Rig(max_substeps=4, depth=1)
    rig.submit(1, Request(prompt(5), max_tokens=80))
    for _ in range(4):
        sent_with_several(rig)
        rig.retire()
        rig.detach(step_failed=True)
        rig.attach(num_blocks=64, block_size=4)
    rig.run()
    assert rig.records[1].finish == _core.FINISH_LENGTH


@pytest.mark.parametrize(
    ("taken", "entries", "substep", "last", "message"),
    [
        (0, None, 1, False, "result 1 of step"),  # one was skipped
        (1, None, 0, False, "result 0 of step"),  # one comes twice
        (3, None, 3, False, "last result is not marked"),
        (1, [], 1, False, "without a token for row 0"),
        (1, [(3, 1, 0.0, 0, 0)], 1, False, "row 3"),
    ],
)
def test_a_substep_against_the_protocol_is_named_and_stops_the_session(
    taken: int, entries: list[tuple[int, int, float, int, int]] | None, substep: int, last: bool, message: str
) -> None:
    rig = Rig(max_substeps=4)
    rig.submit(1, Request(prompt(3), max_tokens=50))
    step = sent_with_several(rig)
    for _ in range(taken):
        rig.retire()
    given = [(0, 1, 0.0, 0, 0)] if entries is None else entries
    with pytest.raises(RuntimeError, match=message):
        rig.scheduler.retire(rig.device.result(step.number, given, substep=substep, last=last), rig.now)
    assert rig.scheduler.tick(rig.now) is None
    rig.scheduler.detach()
    rig.check()


@pytest.mark.parametrize("value", [0, 65])
def test_max_substeps_is_validated(value: int) -> None:
    with pytest.raises(ValueError, match=f"max_substeps is {value}"):
        _core.CoreConfig(max_substeps=value)
