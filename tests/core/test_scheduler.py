"""The scheduler's promises, one by one (CONTRACT.md), on a fake device and a virtual clock."""

import random

import numpy as np
import pytest
from core_device import NAN_TOKEN, PHASES_US, VOCAB, Request, expected_output
from core_rig import STEP_NS, Rig
from twinplane.control_plane import _core
from twinplane.shared import wire


def prompt(n: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + 13 * salt) % (VOCAB - 1) + 1 for i in range(n))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_request_gets_its_tokens_in_order(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.submit(1, Request(prompt(21), max_tokens=30))
    rig.run()
    assert len(rig.records[1].tokens) == 30


@pytest.mark.parametrize("depth", [1, 2])
def test_twenty_mixed_requests_get_what_each_gets_alone(depth: int) -> None:
    rig = Rig(depth=depth)
    for i in range(20):
        rig.submit(i, Request(prompt(1 + 5 * i, i), max_tokens=1 + i, eos=(3,), seed=i, logprobs=i % 2 == 0))
    rig.run()
    assert {record.finish for record in rig.records.values()} <= {_core.FINISH_EOS, _core.FINISH_LENGTH}


def test_depth_two_keeps_two_steps_in_flight_and_relays_the_token_between_them() -> None:
    rig = Rig(depth=2)
    rig.submit(1, Request(prompt(3)))
    first, second = rig.tick(), rig.tick()
    assert first is not None and second is not None
    assert rig.tick() is None
    assert second.token_ids.tolist() == [wire.NO_TOKEN]


def test_depth_one_sends_every_token_inline() -> None:
    rig = Rig(depth=1)
    rig.submit(1, Request(prompt(3)))
    rig.run()
    assert all(wire.NO_TOKEN not in step.token_ids for step in rig.steps)


def test_a_sequence_that_will_end_by_length_is_not_run_ahead() -> None:
    rig = Rig(depth=2)
    rig.submit(1, Request(prompt(3), max_tokens=1))
    rig.run()
    assert [len(step.seqs) for step in rig.steps] == [1, 0], "one step with work, one that only closes the row"


def test_the_row_of_a_stopped_sequence_is_wasted_once_and_its_late_token_dropped() -> None:
    request = next(r for n in range(1, 99) if len(expected_output(r := Request(prompt(n), max_tokens=30, eos=(3, 4, 5, 6)))[0]) == 5)
    rig = Rig(depth=2)
    rig.submit(1, request)
    rig.run()
    assert rig.records[1].finish == _core.FINISH_EOS
    assert sum(len(step.seqs) for step in rig.steps) == 5 + 1


def test_INV_5_every_block_is_accounted_for_after_every_move() -> None:
    rig = Rig(num_blocks=12, block_size=4)  # Rig calls check() after each of its moves
    for i in range(6):
        rig.submit(i, Request(prompt(9, i), max_tokens=20))
    rig.run()
    assert rig.stats().preemptions > 0


def test_INV_6_running_decodes_are_in_every_step_before_any_chunk() -> None:
    rig = Rig(max_step_tokens=12, max_chunk_tokens=10, max_rows=6, num_blocks=100)
    for i in range(4):
        rig.submit(i, Request(prompt(3, i), max_tokens=40))
    for _ in range(6):
        rig.turn()
    rig.submit(9, Request(prompt(80), max_tokens=2))
    seen_chunk = False
    for _ in range(8):
        rig.turn()
        step = rig.steps[-1]
        assert step.num_decodes >= 4
        seen_chunk |= len(step.seqs) > step.num_decodes
    assert seen_chunk
    rig.run()


def test_chunks_are_dealt_oldest_first_within_cap_and_budget() -> None:
    rig = Rig(max_step_tokens=20, max_chunk_tokens=16, depth=1, num_blocks=100)
    for i in range(3):
        rig.submit(i, Request(prompt(30, i)))
    sizes = []
    for _ in range(3):
        step = rig.tick()
        assert step is not None
        sizes.append(step.seqs["num_tokens"].tolist())
        rig.retire()
    assert sizes == [[16, 4], [14, 6], [1, 16, 3]]


@pytest.mark.parametrize("depth", [1, 2])
def test_INV_7_oldest_request_finishes_when_the_pool_is_just_its_need(depth: int) -> None:
    rig = Rig(num_blocks=10, block_size=4, depth=depth)
    rig.submit(0, Request(prompt(11), max_tokens=30))
    for i in range(1, 12):
        rig.submit(i, Request(prompt(5, i), max_tokens=15))
    finished: list[int] = []
    while len(finished) < 12:
        assert rig.turn() or rig.poll()
        finished += [i for i, record in rig.records.items() if record.finish and i not in finished]
    assert rig.records[0].last is not None and rig.records[0].last.preemptions == 0


def test_INV_7_a_resumed_request_emits_a_token_before_it_is_preempted_again() -> None:
    rig = Rig(num_blocks=24, block_size=2, max_rows=6)  # Rig.check_preemptions looks at every one of them
    dice = random.Random(1)
    for i in range(24):
        rig.submit(i, Request(prompt(dice.randint(1, 6), i), max_tokens=dice.randint(2, 40)))
    rig.run()
    assert max(record.last.preemptions for record in rig.records.values() if record.last) > 1


def test_INV_7_nothing_is_preempted_for_something_younger() -> None:
    rig = Rig(num_blocks=12, block_size=4, max_rows=4)
    for i in range(4):
        rig.submit(i, Request(prompt(5, i), max_tokens=25))
    rig.run()
    preemptions = [record.last.preemptions for record in rig.records.values() if record.last]
    assert preemptions[0] == 0 and sum(preemptions) > 0


def test_INV_8_what_can_never_fit_is_refused_with_the_numbers() -> None:
    rig = Rig(num_blocks=10, block_size=4)
    refusal = rig.submit(1, Request(prompt(30), max_tokens=12))
    assert refusal is not None
    assert (refusal.reason, refusal.limit, refusal.asked) == ("NEVER_FITS", 10, 11)
    assert all(part in refusal.message for part in ("11", "10", "30", "12", "40"))
    assert rig.submit(2, Request(prompt(30), max_tokens=11)) is None, "40 stored tokens are 10 blocks"
    rig.run()


def test_INV_8_past_its_deadline_a_waiting_request_is_dropped_before_prefill_is_spent() -> None:
    rig = Rig(max_rows=1)
    rig.submit(1, Request(prompt(4), max_tokens=20))
    rig.turn()
    rig.submit(2, Request(prompt(40), deadline_ns=rig.now + 3 * STEP_NS))
    rig.run()
    assert rig.records[2].finish == _core.FINISH_DEADLINE
    assert rig.records[2].last is not None and rig.records[2].last.queued_ns == 0
    assert rig.stats().prompt_tokens_computed == 4


def test_a_running_request_past_its_deadline_ends_and_frees_what_it_held() -> None:
    rig = Rig()
    rig.submit(1, Request(prompt(4), max_tokens=100, deadline_ns=rig.now + 5 * STEP_NS))
    rig.run()
    assert rig.records[1].finish == _core.FINISH_DEADLINE
    assert 0 < len(rig.records[1].tokens) < 10


@pytest.mark.parametrize("depth", [1, 2])
def test_INV_9_cancelled_blocks_are_free_when_the_steps_in_flight_have_retired(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.submit(1, Request(prompt(20), max_tokens=50))
    for _ in range(4):
        rig.turn()
    while len(rig.device.in_flight) < depth:
        assert rig.tick() is not None
    assert rig.cancel(1)
    assert rig.stats().blocks_referenced == 0
    assert rig.stats().blocks_fenced > 0
    for _ in range(depth):
        rig.retire()
    assert rig.stats().blocks_free + rig.stats().blocks_cached == rig.stats().blocks_total


@pytest.mark.parametrize(
    "change",
    [{"depth": 1}, {"max_chunk_tokens": 1}, {"max_step_tokens": 8}, {"num_blocks": 24}, {"block_size": 16}, {"max_rows": 2}, {"depth": 4}],
    ids=str,
)
def test_INV_10_tokens_do_not_depend_on_how_the_work_is_cut(change: dict[str, int]) -> None:
    rig = Rig(**({"num_blocks": 40} | change))  # Record.verify compares with a lone run
    for i in range(12):
        rig.submit(
            i,
            Request(prompt(3 + 4 * i, i), max_tokens=30, eos=(2,), seed=i, frequency_penalty=0.5 * (i % 2), repetition_penalty=1 + i % 3),
        )
    rig.run()


@pytest.mark.parametrize("seed", range(24))
def test_INV_3_INV_10_short_memory_and_late_results_change_no_token(seed: int) -> None:
    """Deep pipelines whose steps retire whenever they like: preempted sequences still have tokens in flight, and rows named by them."""
    dice = random.Random(seed)
    rig = Rig(num_blocks=dice.randint(14, 30), block_size=2, max_rows=6, depth=dice.randint(3, 5))
    for i in range(14):
        rig.submit(i, Request(prompt(dice.randint(1, 9), i), max_tokens=dice.randint(1, 18), seed=i, eos=(2,)))
    while not all(record.finish for record in rig.records.values()):
        sent = rig.tick() is not None
        if rig.device.in_flight and (not sent or dice.random() < 0.6):
            rig.retire()
            rig.poll()
    rig.run()


def test_A01_prompt_larger_than_the_pool_is_refused_and_those_behind_it_run() -> None:
    rig = Rig(num_blocks=50, block_size=16, max_model_len=2048)
    refusal = rig.submit(0, Request(prompt(1000), max_tokens=10))
    assert refusal is not None and refusal.reason == "NEVER_FITS"
    for i in range(1, 6):
        assert rig.submit(i, Request(prompt(8, i))) is None
    rig.run()
    assert all(rig.records[i].finish == _core.FINISH_LENGTH for i in range(1, 6))


def test_A02_a_request_that_would_outgrow_the_pool_is_refused_not_preempted_for_ever() -> None:
    rig = Rig(num_blocks=16, block_size=16, max_model_len=1024)
    refusal = rig.submit(1, Request(prompt(256 - 64), max_tokens=512))
    assert refusal is not None and refusal.reason == "NEVER_FITS"
    assert rig.submit(2, Request(prompt(256 - 64), max_tokens=65)) is None
    rig.submit(3, Request(prompt(5), max_tokens=5))
    rig.run()
    assert rig.stats().preemptions <= 2


def test_A04_no_ping_pong_when_the_chunk_is_smaller_than_the_preempted_sequence() -> None:
    rig = Rig(num_blocks=68, block_size=16, max_model_len=1024, max_chunk_tokens=128, max_step_tokens=128, max_rows=8)
    requests = {i: Request(prompt(600, i), max_tokens=300) for i in range(2)}
    requests |= {i: Request(prompt(10, i), max_tokens=10) for i in range(2, 30)}
    for i in range(2):
        rig.submit(i, requests[i])
    for i in range(2, 30):
        for _ in range(20):
            rig.turn()
        rig.submit(i, requests[i])
    rig.run()
    assert all(record.last is not None and record.last.preemptions <= 4 for record in rig.records.values())
    useful = sum(len(r.prompt) + r.max_tokens for r in requests.values())
    assert rig.stats().prompt_tokens_computed <= 2 * useful


@pytest.mark.parametrize("depth", [1, 2])
def test_A05_a_preempted_request_is_resumed_before_any_later_arrival(depth: int) -> None:
    rig = Rig(num_blocks=12, block_size=4, max_rows=4, depth=depth)
    for i in range(3):
        rig.submit(i, Request(prompt(6, i), max_tokens=20))
    next_id = 3
    overtaken = False
    while not all(rig.records[i].finish for i in range(3)):
        before = {s["id"]: s["preemptions"] for s in rig.snapshot()["waiting"]}
        rig.tick()
        newly_running = {i for i in rig.order("running") if i in before}
        still_waiting = [s["id"] for s in rig.snapshot()["waiting"] if s["preemptions"]]
        overtaken |= any(started > preempted for started in newly_running for preempted in still_waiting)
        assert rig.order("waiting") == sorted(rig.order("waiting"))
        if len(rig.device.in_flight) == depth or not newly_running:
            if rig.device.in_flight:
                rig.retire()
            rig.poll()
        if next_id < 60:
            rig.submit(next_id, Request(prompt(2, next_id), max_tokens=2))
            next_id += 1
    assert rig.stats().preemptions > 0 and not overtaken
    rig.run()


@pytest.mark.parametrize("n", [0, 1, 2, 3, 9])
def test_A17_blocks_come_back_after_aborts(n: int) -> None:
    rig = Rig(num_blocks=20, block_size=4)
    for i in range(100):
        rig.submit(i, Request(prompt(1 + i % 40, i), max_tokens=1 + i % 7))
        for _ in range(n if i % 3 else 1):
            rig.turn()
        rig.cancel(i)
    rig.run()
    assert sum(rig.stats().finished) == 100
    rig.submit(1000, Request(prompt(60), max_tokens=21))  # the whole pool
    rig.run()
    assert rig.records[1000].finish == _core.FINISH_LENGTH


def test_A21_one_token_asked_is_one_token_given() -> None:
    rig = Rig()
    for i, max_tokens in enumerate((1, 2, 127)):
        rig.submit(i, Request(prompt(1), max_tokens=max_tokens))
    rig.run()
    assert [len(rig.records[i].tokens) for i in range(3)] == [1, 2, 127]
    assert all(rig.records[i].finish == _core.FINISH_LENGTH for i in range(3))


def test_A21_zero_tokens_is_an_error_and_more_than_the_context_a_refusal_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0"):
        Request(prompt(1), max_tokens=0).params()
    refusal = Rig().submit(1, Request(prompt(100), max_tokens=29))
    assert refusal is not None
    assert (refusal.reason, refusal.limit, refusal.asked) == ("PROMPT_TOO_LONG", 128, 129)


def test_A22_prompt_at_the_context_limit() -> None:
    rig = Rig(max_model_len=64)
    assert rig.submit(1, Request(prompt(63), max_tokens=1)) is None
    for i, length in enumerate((64, 65, 164), start=2):
        refusal = rig.submit(i, Request(prompt(length), max_tokens=1))
        assert refusal is not None and refusal.reason == "PROMPT_TOO_LONG" and str(length) in refusal.message
    assert rig.submit(9, Request(prompt(5))) is None
    rig.run()
    assert len(rig.records[1].tokens) == 1 and rig.records[1].finish == _core.FINISH_LENGTH


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("pool", ["one request", "two blocks more"])
@pytest.mark.parametrize("max_rows", [1, 64])
@pytest.mark.parametrize("chunk", [1, "block-1", "block", 8192])
def test_A28_every_combination_of_block_size_pool_rows_and_chunk_works(block_size: int, pool: str, max_rows: int, chunk: int | str) -> None:
    cap = {"block-1": max(1, block_size - 1), "block": block_size}.get(str(chunk), chunk)
    blocks = -(-64 // block_size) + (2 if pool == "two blocks more" else 0)
    rig = Rig(num_blocks=blocks, block_size=block_size, max_rows=max_rows, max_chunk_tokens=cap, max_model_len=65)
    for i in range(3):
        rig.submit(i, Request(prompt(20 + 10 * i, i), max_tokens=10))
    rig.run()
    assert all(record.finish == _core.FINISH_LENGTH for record in rig.records.values())


def test_options_that_contradict_each_other_are_refused_naming_them() -> None:
    with pytest.raises(ValueError, match=r"max_step_tokens is 7.*at least 8.*max_rows"):
        Rig(max_rows=8, max_step_tokens=7)
    with pytest.raises(ValueError, match="depth is 0"):
        Rig(depth=0)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("ring_depth", 3),
        ("max_rows", 8),
        ("max_step_tokens", 64),
        ("max_table_writes", 8 + 64),
        ("max_extra_words", 128 + 18),
        ("max_results", 8),
        ("max_copies", 8),
        ("max_candidates", 8 * 64),
    ],
)
def test_a_session_too_small_for_the_scheduler_is_refused_naming_the_capacity(name: str, least: int) -> None:
    config = _core.CoreConfig(max_rows=8, max_step_tokens=64, max_model_len=128, depth=2)
    pool = _core.Pool(num_blocks=64, block_size=4)
    capacities = wire.Capacities(*_core.capacities_for(config, pool))
    _core.Scheduler(config).attach(pool, list(capacities._replace(**{name: least})))
    with pytest.raises(ValueError, match=rf"{name} is {least - 1}, it must be at least {least}"):
        _core.Scheduler(config).attach(pool, list(capacities._replace(**{name: least - 1})))


def test_requests_are_refused_while_there_was_never_a_data_plane() -> None:
    scheduler = _core.Scheduler(_core.CoreConfig())
    request = Request(prompt(3))
    refusal = scheduler.submit(1, np.array(request.prompt, np.int32), request.params(), 1)
    assert refusal is not None and refusal.reason == "NO_DATA_PLANE"
    assert scheduler.stats().refused == 1


def test_empty_prompts_duplicate_ids_and_negative_tokens_are_refused() -> None:
    rig = Rig()
    refusal = rig.submit(1, Request(()))
    assert refusal is not None and refusal.reason == "EMPTY_PROMPT"
    assert rig.submit(2, Request(prompt(3))) is None
    refusal = rig.submit(2, Request(prompt(3)))
    assert refusal is not None and refusal.reason == "DUPLICATE_ID"
    with pytest.raises(ValueError, match="token -1 at position 1"):
        rig.submit(3, Request((5, -1)))
    rig.run()
    assert rig.submit(2, Request(prompt(4))) is None, "the id is free again after its last event"
    rig.run()


def test_the_waiting_queue_is_bounded_by_requests_and_by_tokens() -> None:
    rig = Rig(max_waiting_requests=3, max_waiting_tokens=50)
    assert rig.submit(1, Request(prompt(100))) is None, "an empty queue takes any length"
    refusal = rig.submit(2, Request(prompt(1)))
    assert refusal is not None and (refusal.reason, refusal.limit, refusal.asked) == ("QUEUE_FULL", 50, 101)
    rig.turn()
    for i in range(3, 6):
        assert rig.submit(i, Request(prompt(2))) is None
    refusal = rig.submit(6, Request(prompt(2)))
    assert refusal is not None and (refusal.reason, refusal.limit, refusal.asked) == ("QUEUE_FULL", 3, 4)
    rig.run()


def test_higher_priority_is_served_first_and_equal_priority_in_order_of_arrival() -> None:
    rig = Rig(max_rows=1)
    for i, priority in enumerate((0, 0, 5, 0, 5, -1)):
        rig.submit(i, Request(prompt(3, i), max_tokens=2, priority=priority))
    order: list[int] = []
    while rig.turn():
        order += [i for i, record in rig.records.items() if record.finish and i not in order]
    assert order == [2, 4, 0, 1, 3, 5]


def test_lowest_priority_yields_first() -> None:
    rig = Rig(num_blocks=10, block_size=4, max_rows=3)
    rig.submit(0, Request(prompt(6, 0), max_tokens=30, priority=-1))
    rig.submit(1, Request(prompt(6, 1), max_tokens=30, priority=0))
    rig.run()
    assert rig.records[0].last is not None and rig.records[1].last is not None
    assert rig.records[0].last.preemptions > 0 and rig.records[1].last.preemptions == 0


def test_the_queue_head_is_not_overtaken_for_lack_of_memory() -> None:
    rig = Rig(num_blocks=16, block_size=4)
    rig.submit(0, Request(prompt(30), max_tokens=20))
    rig.turn()
    rig.submit(1, Request(prompt(50, 1), max_tokens=5))
    rig.submit(2, Request(prompt(2, 2), max_tokens=2))
    while not rig.records[0].finish:
        rig.turn()
        assert not rig.records[2].tokens
    rig.run()


def test_min_tokens_suppresses_stops_on_the_device_and_nothing_else() -> None:
    rig = Rig()
    for i in range(20):
        rig.submit(i, Request(prompt(2 + i, i), max_tokens=40, min_tokens=i, eos=(1, 2, 3, 4), stops=(7, 8)))
    rig.run()
    assert all(len(record.tokens) > i for i, record in rig.records.items())
    assert {record.finish for record in rig.records.values()} >= {_core.FINISH_EOS, _core.FINISH_STOP_TOKEN}


def test_a_token_that_is_both_eos_and_stop_ends_as_eos_and_is_reported() -> None:
    rig = Rig()
    rig.submit(1, Request(prompt(3), max_tokens=30, eos=tuple(range(VOCAB)), stops=tuple(range(VOCAB))))
    rig.run()
    record = rig.records[1]
    assert (record.finish, record.match) == (_core.FINISH_EOS, record.tokens[-1])
    assert len(record.tokens) == 1


def test_row_attachments_carry_history_biases_and_allowed_tokens_also_after_preemption() -> None:
    rig = Rig(num_blocks=14, block_size=4, max_rows=4)
    extras: dict[str, object] = {"bias": ((3, 2.0), (5, -1.0)), "allowed": tuple(range(10, 30)), "min_tokens": 3, "eos": (45,)}
    for i in range(6):
        rig.submit(i, Request(prompt(7, i), max_tokens=20, repetition_penalty=2.0, frequency_penalty=0.5, **extras))  # type: ignore[arg-type]
    rig.run()
    assert rig.stats().preemptions > 0
    kinds = {kind for _, kind, _ in (extra for step in rig.steps for extra in step.extras)}
    assert kinds == set(wire.ExtraKind)


def test_attachments_that_no_step_can_carry_are_refused_with_the_numbers() -> None:
    rig = Rig()
    limit = rig.capacities.max_extra_words
    refusal = rig.submit(1, Request(prompt(3), allowed=tuple(range(limit))))
    assert refusal is not None
    assert (refusal.reason, refusal.limit, refusal.asked) == ("NEVER_FITS", limit, limit + 3)
    assert rig.submit(2, Request(prompt(3), allowed=tuple(range(limit - 3)), max_tokens=1)) is None


def test_an_admission_waits_for_a_step_with_room_for_its_attachments() -> None:
    config = _core.CoreConfig(max_rows=8, max_step_tokens=64, max_chunk_tokens=16, max_model_len=128)
    full = wire.Capacities(*_core.capacities_for(config, _core.Pool(num_blocks=64, block_size=4)))
    rig = Rig(capacities=full._replace(max_extra_words=150), num_blocks=64)
    for i in range(3):
        rig.submit(i, Request(prompt(8, i), allowed=tuple(range(49)), max_tokens=2))
    assert [len(step.opens) for step in (rig.tick(), rig.tick()) if step] == [2, 1]
    rig.run()


def test_logits_that_are_not_finite_fail_their_row_alone() -> None:
    rig = Rig()
    for i in range(4):
        rig.submit(i, Request((*prompt(5, i), NAN_TOKEN) if i == 2 else prompt(5, i)))
    rig.run()
    assert [rig.records[i].finish for i in range(4)] == [_core.FINISH_LENGTH] * 2 + [_core.FINISH_NOT_FINITE, _core.FINISH_LENGTH]


def test_idle_rows_are_closed_by_a_step_of_their_own() -> None:
    rig = Rig()
    rig.submit(1, Request(prompt(3), max_tokens=50))
    rig.turn()
    rig.cancel(1)
    rig.run()
    assert len(rig.steps[-1].seqs) == 0 and len(rig.steps[-1].closes) == 1
    assert rig.tick() is None


@pytest.mark.parametrize("steps", range(7))
def test_a_lost_data_plane_loses_and_repeats_no_token(steps: int) -> None:
    rig = Rig(depth=2)
    for i in range(5):
        rig.submit(i, Request(prompt(4 + 9 * i, i), max_tokens=12, seed=i))
    for _ in range(steps):
        rig.turn()
    rig.tick()
    rig.detach()
    assert rig.order("running") == []
    assert rig.order("waiting") == [i for i in range(5) if not rig.records[i].finish]
    assert rig.submit(9, Request(prompt(3))) is None, "while a session is being replaced requests are queued"
    assert rig.tick() is None
    rig.attach(num_blocks=40, block_size=8)
    rig.run()


def test_a_request_that_the_next_pool_can_never_hold_ends_by_name() -> None:
    rig = Rig(num_blocks=64, block_size=4)
    rig.submit(1, Request(prompt(60), max_tokens=20))
    rig.submit(2, Request(prompt(6), max_tokens=9))
    rig.turn()
    rig.detach()
    rig.submit(3, Request(prompt(60), max_tokens=20))
    rig.attach(num_blocks=8, block_size=4)
    rig.run()
    assert [rig.records[i].finish for i in (1, 2, 3)] == [_core.FINISH_NEVER_FITS, _core.FINISH_LENGTH, _core.FINISH_NEVER_FITS]


def fail_a_step(rig: Rig) -> None:
    """The oldest step in flight raises in the data plane, which reports it and dies."""
    assert rig.tick() is not None
    step = rig.device.in_flight[0][0]
    rig.scheduler.retire(rig.device.result(step.number, [], status=int(wire.StepStatus.FAILED)), rig.now)
    assert rig.tick() is None, "nothing is sent after a failure"
    rig.detach(step_failed=True)
    rig.attach(num_blocks=64, block_size=4)


def test_a_request_in_two_failed_steps_running_is_quarantined_and_its_neighbour_of_one_is_not() -> None:
    rig = Rig(depth=1, max_rows=4)
    rig.submit(1, Request(prompt(5), max_tokens=9))
    fail_a_step(rig)
    assert not rig.records[1].finish
    rig.submit(2, Request(prompt(6), max_tokens=9))
    fail_a_step(rig)
    assert rig.records[1].finish == _core.FINISH_QUARANTINED
    rig.run()
    assert rig.records[2].finish == _core.FINISH_LENGTH


def test_failures_with_a_good_step_between_them_do_not_quarantine() -> None:
    rig = Rig(depth=1)
    rig.submit(1, Request(prompt(5), max_tokens=9))
    for _ in range(4):
        fail_a_step(rig)
        rig.turn()
    rig.run()
    assert rig.records[1].finish == _core.FINISH_LENGTH


def test_a_data_plane_that_dies_without_a_failed_step_is_nobodys_fault() -> None:
    rig = Rig(depth=1)
    rig.submit(1, Request(prompt(5), max_tokens=9))
    for _ in range(5):
        rig.tick()
        rig.detach()
        rig.attach(num_blocks=64, block_size=4)
    rig.run()
    assert rig.records[1].finish == _core.FINISH_LENGTH


@pytest.mark.parametrize(
    ("step", "entries", "last", "message"),
    [
        (5, [], True, "step 5.*oldest in flight is 0"),
        (0, [(7, 1, 0.0, 0, 0)], True, "row 7"),
        (0, [(10_000, 1, 0.0, 0, 0)], True, "row 10000"),
        (0, [], True, "without a token for row 0"),
        (0, [(0, -5, 0.0, 0, 0)], True, "token -5"),
        (0, [(0, 1, 0.0, 0, 0), (0, 1, 0.0, 0, 0)], False, "row 0"),
    ],
)
def test_a_result_against_the_protocol_is_named_and_stops_the_session(step: int, entries: list, last: bool, message: str) -> None:  # type: ignore[type-arg]
    rig = Rig(depth=1)
    rig.submit(1, Request(prompt(3)))
    rig.tick()
    with pytest.raises(RuntimeError, match=message):
        rig.scheduler.retire(rig.device.result(step, entries, last=last), rig.now)
    rig.check()
    assert rig.scheduler.tick(rig.now) is None
    rig.scheduler.detach()
    rig.check()


def test_several_tokens_arrive_in_one_event_when_the_reader_is_slow() -> None:
    rig = Rig()
    rig.submit(1, Request(prompt(3), max_tokens=20, logprobs=True))
    while rig.tick() is not None or rig.device.in_flight:
        if rig.device.in_flight:
            rig.retire()
    events = rig.poll()
    assert len(events) == 1 and len(events[0].tokens) == len(events[0].logprobs) == len(events[0].ranks) == 20


def test_the_last_event_tells_the_times_and_preemptions() -> None:
    rig = Rig(max_rows=1, depth=1)
    rig.submit(1, Request(prompt(3), max_tokens=5))
    rig.submit(2, Request(prompt(30), max_tokens=4))
    rig.run()
    last = rig.records[2].last
    assert last is not None
    assert (last.queued_ns, last.prefill_ns, last.decode_ns) == (5 * STEP_NS, 2 * STEP_NS, 3 * STEP_NS)


def test_what_the_data_plane_says_its_phases_took_adds_up() -> None:
    rig = Rig()
    rig.submit(1, Request(prompt(30), max_tokens=4))
    rig.run()
    stats = rig.stats()
    assert stats.results_taken > 4
    assert (stats.apply_us_total, stats.forward_us_total, stats.sample_us_total) == tuple(us * stats.results_taken for us in PHASES_US)


def test_host_gap_counts_only_the_time_in_which_work_was_runnable() -> None:
    rig = Rig(depth=1)
    rig.submit(1, Request(prompt(3), max_tokens=3))
    rig.tick()
    rig.retire()
    rig.now += 70  # the scheduler dawdles
    rig.run()
    idle = rig.stats().host_gap_ns_total
    assert idle == 70
    rig.now += 10**9  # nothing to do
    rig.submit(2, Request(prompt(3), max_tokens=1))
    rig.run()
    assert rig.stats().host_gap_ns_total == idle
