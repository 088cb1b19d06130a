"""Trying again: only before the first token, and when the server says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from front_support import serving
from twinplane.client import AsyncClient, Client, RetryPolicy, TwinplaneError
from twinplane.client.retry import Attempts
from twinplane.control_plane.types import EngineError, EngineRequest, QueueFullError, UnavailableError

LATER = QueueFullError("full", retry_delay=0.05)


class Scripted(FakeEngine):
    """Fails the first so many requests, before or after their first token."""

    def __init__(self, *failures: EngineError, after_tokens: int = 0) -> None:
        super().__init__(lambda request: [10, 11, 12])
        self.failures = list(failures)
        self.after_tokens = after_tokens
        self.attempts: list[float] = []

    async def generate(self, request: EngineRequest) -> AsyncIterator[Any]:  # type: ignore[override]
        self.attempts.append(time.monotonic())
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None and self.after_tokens == 0:
            raise failure
        async for delta in super().generate(request):
            yield delta
            if failure is not None:
                raise failure


@pytest.mark.parametrize("kind", ["generate", "stream"])
async def test_a_refusal_is_tried_again_after_the_servers_delay(kind: str) -> None:
    engine = Scripted(LATER, UnavailableError("away", retry_delay=0.05))
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        result = await (client.generate("x") if kind == "generate" else client.stream("x").result())
    assert result.token_ids == [10, 11, 12]
    first, second, third = engine.attempts
    assert second - first >= 0.05
    assert third - second >= 0.05


async def test_the_blocking_client_retries_alike() -> None:
    engine = Scripted(LATER, LATER)
    async with serving(engine) as (target, _):

        def call() -> list[int]:
            with Client(target) as client:
                return client.generate("x").token_ids + client.stream("x").result().token_ids

        assert await asyncio.to_thread(call) == [10, 11, 12] * 2
    assert len(engine.attempts) == 4


async def test_after_the_first_token_nothing_is_started_over() -> None:
    engine = Scripted(UnavailableError("lost", retry_delay=0.01), after_tokens=1)
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        stream = client.stream("x")
        assert (await anext(stream)).token_ids[0] == 10
        with pytest.raises(TwinplaneError, match="lost"):
            await stream.result()
    assert len(engine.attempts) == 1


async def test_attempts_and_the_timeout_bound_the_retries() -> None:
    engine = Scripted(*[LATER] * 10)
    async with serving(engine) as (target, _):
        async with AsyncClient(target, retry=RetryPolicy(attempts=3)) as client:
            with pytest.raises(TwinplaneError, match="full"):
                await client.generate("x")
        assert len(engine.attempts) == 3
        engine.failures = [QueueFullError("full", retry_delay=60.0)] * 10
        async with AsyncClient(target) as client:
            with pytest.raises(TwinplaneError, match="full"):  # at once: the delay is beyond the timeout
                await client.generate("x", timeout=5.0)
        assert len(engine.attempts) == 4


async def test_the_clients_own_mistakes_are_never_tried_again() -> None:
    engine = Scripted()
    async with serving(engine) as (target, _), AsyncClient(target) as client:
        with pytest.raises(TwinplaneError):
            await client.generate("x", temperature=-1)
        with pytest.raises(TwinplaneError, match="NOT_FOUND"):
            await client.generate("x", model="other")
    assert engine.attempts == []


def test_delays_are_jittered_grow_and_are_capped() -> None:
    policy = RetryPolicy(attempts=99, base=0.1, cap=1.0)
    plain = TwinplaneError("away", code="UNAVAILABLE")
    for attempt in range(1, 30):
        delays = {policy.delay(attempt, plain) for _ in range(20)}
        assert len(delays) > 1
        assert max(delays) <= min(1.0, 0.1 * 2 ** (attempt - 1))
    told = TwinplaneError("away", code="UNAVAILABLE", retry_delay=2.0)
    assert all(2.0 <= policy.delay(1, told) <= 3.0 for _ in range(20))


def test_an_oversized_message_is_not_worth_another_attempt() -> None:
    too_large = TwinplaneError("message larger than max", code="RESOURCE_EXHAUSTED")
    with pytest.raises(TwinplaneError):
        Attempts(RetryPolicy(), None).pause(too_large)
