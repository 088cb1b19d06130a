"""INV-8: no prefill is spent on what can not be in time (CONTRACT.md, "A pass")."""

import pytest
from timed_device import TimedRig, chunk_tokens, linear_cost
from twinplane.control_plane import _core
from twinplane.control_plane.engine import Engine
from twinplane.control_plane.types import DeadlineError, EngineRequest

DEVICE = linear_cost(constant=10_000, decode=500, token=1_000)
TRUST_AFTER = 16  # kSeenToTrust: steps with prompt chunks


def learned(**config: int) -> TimedRig:
    """A rig whose cost model is trusted."""
    rig = TimedRig(DEVICE, **config)
    for i in range(TRUST_AFTER + 40):
        rig.submit(20 + 10 * i, 1)
        while rig.turn():
            pass
    return rig


def prompt_tokens_computed(rig: TimedRig) -> int:
    return sum(chunk_tokens(step) for step, _ in rig.steps)


def test_a_waiting_request_that_can_not_be_in_time_is_dropped_before_prefill() -> None:
    rig = learned()
    before = prompt_tokens_computed(rig)
    late = rig.submit(1000, 5, deadline_ns=rig.now + 500_000_000)  # its prompt takes a second
    rig.turn()
    assert rig.streams[late].finish == _core.FINISH_UNREACHABLE
    assert prompt_tokens_computed(rig) == before
    last = rig.streams[late].last
    assert last is not None and 0.8e9 < last.estimate_ns < 1.01e9
    assert rig.scheduler.stats().finished[_core.FINISH_UNREACHABLE] == 1
    rig.scheduler.check()


def test_what_can_be_in_time_alone_is_served_and_ends_in_time() -> None:
    rig = learned()
    request = rig.submit(1000, 1, deadline_ns=rig.now + 1_050_000_000)
    while rig.turn():
        pass
    assert rig.streams[request].finish == _core.FINISH_LENGTH


def test_the_margin_is_in_the_requests_favour() -> None:
    rig = learned()
    rig.submit(1000, 1, deadline_ns=rig.now + 1_005_000_000)  # needs 1.01 s: the model may be off by that
    rig.turn()
    assert rig.scheduler.stats().finished[_core.FINISH_UNREACHABLE] == 0


def test_the_requests_behind_a_hopeless_one_are_not_held_up() -> None:
    rig = learned()
    for _ in range(3):
        rig.submit(2000, 1, deadline_ns=rig.now + 100_000_000)
    good = rig.submit(30, 1, deadline_ns=rig.now + 100_000_000)
    while rig.turn():
        pass
    assert rig.streams[good].finish == _core.FINISH_LENGTH
    assert rig.scheduler.stats().finished[_core.FINISH_UNREACHABLE] == 3


@pytest.mark.parametrize("steps", [0, TRUST_AFTER - 2])
def test_an_estimate_that_is_not_trusted_drops_nobody(steps: int) -> None:
    rig = TimedRig(DEVICE)
    for _ in range(steps):
        rig.submit(20, 1)
        while rig.turn():
            pass
    request = rig.submit(1500, 1, deadline_ns=rig.now + 500_000_000)
    rig.turn()
    assert prompt_tokens_computed(rig) > 1500 - 1
    assert rig.streams[request].finish != _core.FINISH_UNREACHABLE


def test_a_new_data_plane_has_to_be_learned_first() -> None:
    rig = learned()
    rig.scheduler.detach()
    rig.scheduler.attach(_core.Pool(num_blocks=4096, block_size=16), list(rig.capacities))
    rig.submit(1500, 1, deadline_ns=rig.now + 500_000_000)
    rig.turn()
    assert rig.scheduler.stats().finished[_core.FINISH_UNREACHABLE] == 0


def test_a_request_that_has_emitted_is_not_dropped_when_it_is_resumed() -> None:
    rig = learned()
    request = rig.submit(800, 50, deadline_ns=rig.now + 900_000_000)
    rig.turn()
    rig.turn()
    rig.scheduler.detach()  # it goes back to the queue, with tokens that a client has
    rig.scheduler.attach(_core.Pool(num_blocks=4096, block_size=16), list(rig.capacities))
    assert len(rig.streams[request].token_times) > 0
    rig.scheduler.tick(rig.now)
    assert rig.scheduler.stats().finished[_core.FINISH_UNREACHABLE] == 0


def test_the_client_is_told_why_and_how_long_it_would_have_taken() -> None:
    rig = learned()
    late = rig.submit(1000, 5, deadline_ns=rig.now + 500_000_000)
    rig.turn()
    event = rig.streams[late].last
    assert event is not None
    engine = Engine(_core.EngineCore(_core.CoreConfig()), eos_token_ids=(), max_model_len=100)
    error = engine._error(event, EngineRequest("r", (1,) * 1000))
    assert isinstance(error, DeadlineError)
    assert "before its prompt was computed" in error.message and "1000 tokens" in error.message
    assert 0.8 < float(error.metadata["estimate_s"]) < 1.01
    waiting = event._replace(finish=_core.FINISH_DEADLINE, queued_ns=0)
    assert "while it waited" in engine._error(waiting, EngineRequest("r", (1,))).message
