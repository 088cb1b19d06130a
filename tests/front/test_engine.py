"""The engine facade over a scripted core: how sequences of one request are numbered, dealt out, merged and cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from fake_engine import INFO
from twinplane.control_plane import _core
from twinplane.control_plane.engine import Engine
from twinplane.control_plane.types import (
    Delta,
    EarlyStopping,
    EngineRequest,
    EngineState,
    Finish,
    FinishReason,
    QueueFullError,
    RowFailedError,
    SamplingParams,
)


def event(request_id: int, tokens: list[int], finish: int = _core.FINISH_NONE, **more: Any) -> Any:
    """As the core reports it."""
    fields = {
        "request_id": request_id, "tokens": tokens, "logprobs": [], "ranks": [], "finish": finish, "match": -1, "cached_tokens": 0,
        "preemptions": 0, "queued_ns": 0, "prefill_ns": 0, "decode_ns": 0, "score": 0.0,
    }  # fmt: skip
    return _Event(**(fields | more))


class _Event(SimpleNamespace):
    def _replace(self, **changes: Any) -> _Event:
        return _Event(**(vars(self) | changes))


class ScriptedCore:
    """Takes what the engine submits; reports what a test says."""

    def __init__(self) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.submitted: list[tuple[int, list[int], dict[str, Any]]] = []
        self.cancelled: list[int] = []
        self.resets = 0
        self.refusal: Any = None
        self._events: list[Any] = []

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def stats(self) -> Any:
        return _core.Stats(**dict.fromkeys(_core.Stats._fields, 0) | {"finished": [0] * 16})  # type: ignore[arg-type]

    def submit(self, request_id: int, prompt: Any, params: Any) -> Any:
        if self.refusal is None:
            self.submitted.append((request_id, prompt.tolist(), params))
        return self.refusal

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def poll(self) -> list[Any]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event_fd)
        events, self._events = self._events, []
        return events

    def report(self, *events: Any) -> None:
        self._events += events
        os.eventfd_write(self.event_fd, 1)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> ScriptedCore:
    monkeypatch.setattr(_core, "RequestParams", lambda **given: given)
    return ScriptedCore()


@pytest.fixture
async def engine(core: ScriptedCore) -> AsyncIterator[Engine]:
    facade = Engine(core, eos_token_ids=[2], max_model_len=100, seed=1)  # type: ignore[arg-type]
    facade.start()
    facade.session_changed(EngineState.READY, INFO)
    yield facade
    await facade.stop()


def request(name: str = "r", **sampling: Any) -> EngineRequest:
    return EngineRequest(name, (5, 6, 7), SamplingParams(**sampling), max_tokens=10)


async def test_the_core_gets_groups_as_asked_and_an_id_for_every_sequence(engine: Engine, core: ScriptedCore) -> None:
    for asked in (
        request("one"),
        request("samples", n=2, best_of=3),
        request("beams", n=2, beam_width=4, temperature=0.0, length_penalty=0.5, early_stopping=EarlyStopping.NEVER),
        request("last"),
    ):
        stream = engine.generate(asked)
        core.report(event(1000, []))
        with pytest.raises(TimeoutError):
            await _soon(stream)
    ids = [submitted[0] for submitted in core.submitted]
    assert ids == [1, 2, 5, 9]  # as many ids as sequences
    group = ("n", "beam_width", "length_penalty", "early_stopping")
    assert [{name: params[name] for name in group if name in params} for _, _, params in core.submitted] == [
        {}, {"n": 3}, {"beam_width": 4, "length_penalty": 0.5, "early_stopping": 2}, {},
    ]  # fmt: skip
    assert core.cancelled == list(range(1, 10))  # nobody waits for them any more


async def test_salts_are_namespaces_of_the_cache_and_the_common_one_has_none(engine: Engine, core: ScriptedCore) -> None:
    for index, (salt, cache) in enumerate([("", True), ("tenant", True), ("other", True), ("tenant", True), ("tenant", False)]):
        stream = engine.generate(replace(request(f"r{index}"), cache_salt=salt, prefix_cache=cache))
        with pytest.raises(TimeoutError):
            await _soon(stream)
    keys = [params.get("cache_key", b"") for _, _, params in core.submitted]
    assert [len(key) for key in keys] == [0, 32, 32, 32, 0]
    assert keys[1] == keys[3] != keys[2]
    assert [params.get("cache", True) for _, _, params in core.submitted] == [True, True, True, True, False]


async def _soon(stream: Any) -> list[Delta]:
    async with asyncio.timeout(0.05):
        return await anext(stream)  # type: ignore[no-any-return]


async def test_news_of_several_sequences_comes_at_once_merged_and_in_order(engine: Engine, core: ScriptedCore) -> None:
    stream = engine.generate(request(n=3, best_of=3))
    core.report(event(3, [30]), event(1, [10]), event(3, [31], cached_tokens=2))
    deltas = await anext(stream)
    assert [(d.index, d.token_ids, d.cached_prompt_tokens, d.finish) for d in deltas] == [(0, [10], 0, None), (2, [30, 31], 2, None)]
    core.report(event(2, [20], _core.FINISH_LENGTH), event(1, [2], _core.FINISH_EOS, match=2))
    deltas = await anext(stream)
    assert [(d.index, d.finish) for d in deltas] == [(0, Finish(FinishReason.STOP, eos_token_id=2)), (1, Finish(FinishReason.LENGTH))]
    assert all(d.timing is not None and d.score is None for d in deltas)
    core.report(event(3, [32], _core.FINISH_LENGTH))
    assert [d.index for d in await anext(stream)] == [2]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert core.cancelled == []


async def test_hypotheses_carry_their_scores(engine: Engine, core: ScriptedCore) -> None:
    stream = engine.generate(request(n=2, beam_width=2, temperature=0.0))
    core.report(event(1, [10, 2], _core.FINISH_EOS, match=2, score=-0.5), event(2, [10, 11], _core.FINISH_LENGTH, score=-0.75))
    assert [(d.index, d.token_ids, d.score) for d in await anext(stream)] == [(0, [10, 2], -0.5), (1, [10, 11], -0.75)]


async def test_one_sample_can_be_cancelled_and_only_while_it_lives(engine: Engine, core: ScriptedCore) -> None:
    stream = engine.generate(request(n=3, best_of=3))
    core.report(event(1, [10], _core.FINISH_LENGTH))
    await anext(stream)
    engine.cancel_sequence("r", 0)  # has ended
    engine.cancel_sequence("r", 2)
    engine.cancel_sequence("nobody", 0)
    assert core.cancelled == [3]
    core.report(event(3, [], _core.FINISH_CANCELLED))
    assert [(d.index, d.finish) for d in await anext(stream)] == [(2, Finish(FinishReason.CANCELLED))]
    assert engine.cancel("r")
    assert core.cancelled == [3, 2]
    await stream.aclose()
    assert core.cancelled == [3, 2, 2]
    assert not engine.cancel("r")


async def test_when_one_sample_fails_the_request_fails_and_the_others_are_cancelled(engine: Engine, core: ScriptedCore) -> None:
    stream = engine.generate(request(n=3, best_of=3))
    core.report(event(2, [], _core.FINISH_NOT_FINITE))
    with pytest.raises(RowFailedError):
        await anext(stream)
    assert core.cancelled == [1, 3]
    core.report(event(1, [10]), event(3, [], _core.FINISH_CANCELLED))  # late: nobody is there to hear it
    assert engine.cancel("r") is False


async def test_a_refused_request_leaves_nothing_and_its_ids_are_used_again(engine: Engine, core: ScriptedCore) -> None:
    core.refusal = _core.Refusal("QUEUE_FULL", 1, 4, "the queue is full", "requests")
    with pytest.raises(QueueFullError):
        await anext(engine.generate(request(n=4, best_of=4)))
    assert await engine.drain(0) == 0  # nothing is live
    assert core.cancelled == []


async def test_draining_counts_requests_and_cancels_every_sequence(engine: Engine, core: ScriptedCore) -> None:
    stream = engine.generate(request(n=3, best_of=3))
    core.report(event(1, [10]))
    await anext(stream)
    assert await engine.drain(0) == 1
    assert core.cancelled == [1, 2, 3]


async def test_the_prefix_cache_is_reset_in_the_core(engine: Engine, core: ScriptedCore) -> None:
    await engine.reset_prefix_cache()
    assert core.resets == 1


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
async def test_a_priority_that_the_policy_ignores_is_told_of_once(core: ScriptedCore, policy: str) -> None:
    engine = Engine(core, eos_token_ids=[2], max_model_len=100, seed=1, policy=policy)  # type: ignore[arg-type]
    engine.start()
    engine.session_changed(EngineState.READY, INFO)
    with structlog.testing.capture_logs() as logs:
        for name, priority in (("plain", 0), ("urgent", 3), ("patient", -3)):
            stream = engine.generate(replace(request(name), priority=priority))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
    told = [(entry["log_level"], entry["priority"]) for entry in logs if entry["event"] == "priority_ignored"]
    assert told == ([("warning", 3)] if policy == "fcfs" else [])
    await engine.stop()
