"""When a full queue tells its clients to come back."""

import numpy as np
import pytest
from core_device import Request
from core_rig import Rig
from hypothesis import given
from hypothesis import strategies as st
from twinplane.control_plane import _core
from twinplane.control_plane.engine import RETRY_DELAY_S, Engine
from twinplane.control_plane.rates import DrainRate
from twinplane.control_plane.types import EngineInfo, EngineState


def test_the_delay_is_the_excess_over_the_pace() -> None:
    rate = DrainRate()
    rate.sample(100.0, 50, 1000)
    rate.sample(110.0, 70, 6000)
    assert rate.seconds_until(requests=4) == pytest.approx(2.0)
    assert rate.seconds_until(tokens=2500) == pytest.approx(5.0)


def test_without_a_pace_there_is_no_estimate() -> None:
    rate = DrainRate()
    rate.sample(1.0, 5, 5)
    assert rate.seconds_until(requests=1) is None
    rate.sample(2.0, 5, 5)
    assert rate.seconds_until(requests=1) is None
    rate.sample(3.0, 3, 2)  # more was put back than left
    assert rate.seconds_until(requests=1) is None


def test_what_happened_long_ago_does_not_count() -> None:
    rate = DrainRate()
    rate.sample(0.0, 0, 0)
    rate.sample(1.0, 1_000_000, 0)
    for second in range(2, 62):
        rate.sample(float(second), 1_000_000 + second, 0)
    assert rate.seconds_until(requests=10) == pytest.approx(10.0, rel=0.05)


@given(st.lists(st.tuples(st.floats(0.01, 10), st.integers(0, 100)), min_size=2, max_size=80), st.integers(1, 10**6))
def test_the_delay_is_always_one_a_client_can_use(moves: list[tuple[float, int]], excess: int) -> None:
    rate, now, total = DrainRate(), 0.0, 0
    for seconds, left in moves:
        now, total = now + seconds, total + left
        rate.sample(now, total, total)
    delay = rate.seconds_until(requests=excess)
    assert delay is None or 0.1 <= delay <= 60
    assert len(rate._samples) <= len(moves)


def test_what_leaves_the_queue_is_counted_once_also_if_it_comes_back() -> None:
    rig = Rig(num_blocks=12, block_size=4)
    for i in range(6):
        rig.submit(i, Request(tuple(range(1, 10)), max_tokens=20))
    rig.cancel(5)
    rig.run()
    assert rig.stats().preemptions > 0
    assert rig.stats().dequeued == 6


async def test_a_full_queue_says_when_by_its_own_pace_and_one_second_when_it_has_none() -> None:
    core = _core.EngineCore(_core.CoreConfig(max_waiting_requests=1))
    engine = Engine(core, eos_token_ids=(), max_model_len=100)
    engine.session_changed(EngineState.READY, EngineInfo("cpu", "float32", "float32", 16, 100, 100, 50, ""))
    full = _core.Refusal("QUEUE_FULL", 3, 9, "full", "requests")
    assert engine._retry_delay(full) == RETRY_DELAY_S
    start = engine._drain_rate._samples[0][0]
    engine._drain_rate._samples[0] = (start - 10, core.stats().dequeued - 20, 0)
    assert engine._retry_delay(full) == pytest.approx(3.0, rel=0.1)
    assert engine._retry_delay(full._replace(unit="")) == RETRY_DELAY_S


def test_a_refusal_names_what_there_are_too_many_of() -> None:
    rig = Rig(max_waiting_requests=2, max_waiting_tokens=10)
    assert rig.submit(1, Request((1, 2, 3))) is None
    by_tokens = rig.submit(2, Request((1,) * 9))
    assert rig.submit(2, Request((1,))) is None
    by_requests = rig.submit(3, Request((1,)))
    never = rig.scheduler.submit(4, np.ones(200, np.int32), Request((1,)).params(), rig.now)
    assert by_tokens is not None and by_requests is not None and never is not None
    assert (by_tokens.unit, by_requests.unit, never.unit) == ("tokens", "requests", "")
