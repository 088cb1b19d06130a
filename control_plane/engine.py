"""The engine facade: asyncio in front of the native core.

One :class:`Engine` lives on one event loop. ``generate`` submits a request and yields what the core
reports of it; closing the iterator cancels. The core never calls Python: it fills its event queue and
makes ``event_fd`` readable once per batch, and :meth:`Engine._pump` deals the batch out to streams.

The session with the data plane is :mod:`twinplane.control_plane.sessions`' business; it tells the
engine by :meth:`Engine.session_changed`.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any

import numpy as np
from twinplane.shared import log

from . import _core
from .rates import DrainRate, TokenRate
from .types import (
    DeadlineError,
    Delta,
    DrainingError,
    DuplicateRequestError,
    EngineError,
    EngineInfo,
    EngineRequest,
    EngineState,
    Finish,
    FinishReason,
    InvalidRequestError,
    Load,
    NeverFitsError,
    PromptTooLongError,
    QuarantinedError,
    QueueFullError,
    RowFailedError,
    SamplingParams,
    Timing,
    UnavailableError,
)

logger = log.get_logger(__name__)

RETRY_DELAY_S = 1.0  # suggested to clients when the data plane is away, or nothing better is known


class _Stream:
    """One live request: what the core reported of its sequences and the reader has not taken yet.

    The core numbers the sequences of a request ``core_id``, ``core_id + 1``, ... Tokens that pile up behind a slow reader are
    merged into one event a sequence, so a stream holds at most ``max_tokens`` tokens each however long nobody reads.
    """

    __slots__ = ("_events", "_wake", "core_id", "core_ids", "live", "request_id")

    def __init__(self, core_id: int, request_id: str, num_sequences: int) -> None:
        self.core_id = core_id
        self.core_ids = range(core_id, core_id + num_sequences)
        self.request_id = request_id
        self.live = set(range(num_sequences))  # sequences whose end the core has not reported: there is something to cancel
        self._events: dict[int, _core.Event] = {}  # by sequence
        self._wake = asyncio.Event()

    def push(self, event: _core.Event) -> None:
        index = event.request_id - self.core_id
        earlier = self._events.get(index)
        if earlier is not None:
            event = event._replace(
                tokens=earlier.tokens + event.tokens,
                logprobs=earlier.logprobs + event.logprobs,
                ranks=earlier.ranks + event.ranks,
            )
        self._events[index] = event
        if event.finish != _core.FINISH_NONE:
            self.live.discard(index)
        self._wake.set()

    async def next(self) -> list[_core.Event]:
        """What is new, at most one event a sequence, in their order."""
        await self._wake.wait()
        self._wake.clear()
        events, self._events = self._events, {}
        return [events[index] for index in sorted(events)]


class Engine:
    """Submits requests to the core and streams what comes back.

    Args:
        core: the native core; started by :meth:`start`.
        eos_token_ids: the model's end-of-sequence tokens.
        max_model_len: longest sequence (prompt + output) in tokens that the model and the operator allow.
        seed: base of the seeds given to requests that bring none; None = random.
        policy: the core's; with "fcfs" the first request that has a priority is told of in the log.
    """

    def __init__(
        self, core: _core.EngineCore, *, eos_token_ids: Iterable[int], max_model_len: int, seed: int | None = None, policy: str = "priority"
    ) -> None:
        self._core = core
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_model_len = max_model_len
        self._streams: dict[int, _Stream] = {}
        self._core_ids: dict[str, int] = {}
        self._next_core_id = 1
        self._session_state = EngineState.WAITING
        self._draining = False
        self._info: EngineInfo | None = None
        self._changed = asyncio.Event()  # replaced at every change, so that any number may wait
        self._idle = asyncio.Event()
        self._idle.set()
        self._rate = TokenRate()
        self._drain_rate = DrainRate()
        self._seeds = random.Random(secrets.randbits(128) if seed is None else seed)
        self._ignores_priority = policy == "fcfs"
        self._failure: EngineError | None = None  # why streams end early while stopping

    # ------------------------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the core's thread and listen to its events. Call on the loop that will use the engine."""
        asyncio.get_running_loop().add_reader(self._core.event_fd, self._pump)
        self._core.start()

    async def stop(self) -> None:
        """End the core; live streams fail with UNAVAILABLE. Idempotent."""
        if self._session_state is EngineState.STOPPED:
            return
        self._failure = self._failure or DrainingError("the server is stopping", retry_delay=RETRY_DELAY_S)
        self._log_figures()
        await asyncio.to_thread(self._core.stop)
        self._pump()
        asyncio.get_running_loop().remove_reader(self._core.event_fd)
        self._set_session_state(EngineState.STOPPED)

    def _log_figures(self) -> None:
        """What the scheduler did and cost. ``apply``, ``forward``, ``sample``: the data plane's share of a substep, in the mean;
        ``host_gap``: it waited for a step although there was work; ``over_itl_target``: share of the steps with decodes that took
        longer than --itl-target-ms."""
        stats = self._core.stats()
        results = max(stats.results_taken, 1)
        logger.info(
            "scheduler",
            steps=stats.steps_retired,
            substeps=stats.results_taken,
            steps_interrupted=stats.steps_interrupted,
            tokens=stats.tokens_emitted,
            prompt_tokens=stats.prompt_tokens_computed,
            cached_prompt_tokens=stats.cached_tokens,
            preemptions=stats.preemptions,
            swapped_blocks=stats.blocks_swapped_out,
            dropped_for_deadline=stats.finished[_core.FINISH_UNREACHABLE],
            tick_us=round(stats.tick_ns_total / 1e3 / max(stats.ticks, 1), 2),
            tick_max_us=round(stats.tick_ns_max / 1e3, 1),
            apply_us=round(stats.apply_us_total / results),
            forward_us=round(stats.forward_us_total / results),
            sample_us=round(stats.sample_us_total / results),
            host_gap_us=round(stats.host_gap_ns_total / 1e3 / max(stats.steps_retired, 1), 2),
            missed_wakes=stats.missed_wakes,
            step_us=stats.step_us,
            predicted_us=stats.predicted_us,
            step_margin=round(stats.step_margin, 3),
            chunk_allowance=stats.chunk_allowance,
            over_itl_target=round(stats.steps_over_target / max(stats.steps_with_decodes, 1), 4),
        )

    async def drain(self, grace: float) -> int:
        """Refuse new requests, let live ones finish for ``grace`` seconds, then end the rest with UNAVAILABLE.

        Returns the number of requests that did not finish in time.
        """
        self._draining = True
        self._notify()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout=max(grace, 0.0))
            return 0
        except TimeoutError:
            unfinished = [self._streams[core_id] for core_id in self._core_ids.values()]
            self._failure = DrainingError(f"the server stopped before the request finished ({grace:g} s grace)", retry_delay=RETRY_DELAY_S)
            for stream in unfinished:
                self._cancel(stream)
            return len(unfinished)

    # ----------------------------------------------------------------------------------- state

    @property
    def state(self) -> EngineState:
        if self._draining and self._session_state is not EngineState.STOPPED:
            return EngineState.DRAINING
        return self._session_state

    @property
    def info(self) -> EngineInfo | None:
        """What the data plane said of itself; None before the first one has attached."""
        return self._info

    @property
    def max_model_len(self) -> int:
        """Longest sequence served now: the model's limit, or less if the KV pool is smaller."""
        return self._info.max_model_len if self._info else self._max_model_len

    def session_changed(self, state: EngineState, info: EngineInfo | None = None) -> None:
        """The session manager's report: a data plane attached, is ready, stalls or went away."""
        if info is not None:
            self._info = info
        self._set_session_state(state)

    async def watch_state(self) -> AsyncIterator[EngineState]:
        """Yield the state now and at each change. A watcher that is slow sees the latest, not every one."""
        last: EngineState | None = None
        while last is not EngineState.STOPPED:
            changed = self._changed
            if self.state is not last:
                last = self.state
                yield last
            else:
                await changed.wait()

    def load(self) -> Load:
        stats = self._core.stats()
        since = (time.monotonic_ns() - stats.last_step_ns) / 1e9 if stats.last_step_ns else None
        return Load(
            running_requests=stats.running,
            waiting_requests=stats.waiting,
            waiting_prompt_tokens=stats.waiting_tokens,
            used_kv_blocks=stats.blocks_referenced + stats.blocks_fenced,
            total_kv_blocks=stats.blocks_total,
            generated_tokens_per_second=self._rate.per_second(),
            scheduler_steps=stats.steps_sent,
            cached_kv_blocks=stats.blocks_cached,
            prefix_cache_hit_rate=stats.cached_tokens / max(stats.cached_tokens + stats.prompt_tokens_computed, 1),
            seconds_since_last_step=since,
        )

    def _set_session_state(self, state: EngineState) -> None:
        self._session_state = state
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # -------------------------------------------------------------------------------- requests

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[Delta], None]:
        """Submit ``request`` and yield its deltas, at most one a sequence; each sequence's last one carries ``finish`` and ``timing``.

        Closing the iterator early cancels the request.

        Raises:
            InvalidRequestError, PromptTooLongError, NeverFitsError: it can not be served, with the numbers.
            DuplicateRequestError: the id is live.
            QueueFullError, UnavailableError, DrainingError: not now; ``retry_delay`` says when to ask again.
            DeadlineError, RowFailedError, QuarantinedError: it ended without an answer. If one of several sequences does,
                the request does.
        """
        stream = self._submit(request)
        try:
            running = request.sampling.num_sequences
            while running:
                deltas = []
                for event in await stream.next():
                    if event.tokens or event.finish in _FINISHES:
                        deltas.append(self._delta(event, stream, request))
                    if event.finish in _FINISHES:
                        running -= 1
                    elif event.finish != _core.FINISH_NONE:
                        raise self._error(event, request)
                if deltas:
                    yield deltas
        finally:
            self._release(stream)

    def cancel(self, request_id: str) -> bool:
        """Cancel by id; every sequence ends with ``FinishReason.CANCELLED``. False if the id is not live."""
        core_id = self._core_ids.get(request_id)
        if core_id is None:
            return False
        self._cancel(self._streams[core_id])
        return True

    def cancel_sequence(self, request_id: str, index: int) -> None:
        """Cancel one sample of a request; nothing happens if it has ended. (Cancelling one beam cancels the search.)"""
        core_id = self._core_ids.get(request_id)
        if core_id is not None and index in self._streams[core_id].live:
            self._core.cancel(core_id + index)

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        await asyncio.to_thread(self._core.reset_prefix_cache)

    def _submit(self, request: EngineRequest) -> _Stream:
        self._check_accepting()
        if request.request_id in self._core_ids:
            raise DuplicateRequestError(f"request id {request.request_id!r} is live already", field="request_id")
        core_id = self._next_core_id
        params = self._params(request)
        # Known to the pump before the core can report anything.
        stream = _Stream(core_id, request.request_id, request.sampling.num_sequences)
        self._streams.update(dict.fromkeys(stream.core_ids, stream))
        refusal = self._core.submit(core_id, np.asarray(request.prompt_token_ids, dtype=np.int32), params)
        if refusal is not None:
            self._forget(stream)
            raise _refused(refusal, self._retry_delay(refusal))
        self._next_core_id = stream.core_ids.stop
        self._core_ids[request.request_id] = core_id
        self._idle.clear()
        if request.priority and self._ignores_priority:
            self._ignores_priority = False  # said once
            logger.warning("priority_ignored", policy="fcfs", priority=request.priority, hint="--policy priority or fair heeds it")
        return stream

    def _retry_delay(self, refusal: _core.Refusal) -> float:
        """Seconds until a full queue has room for the request, by the pace at which it empties."""
        if refusal.unit:
            self._sample_queue(time.monotonic())
            delay = self._drain_rate.seconds_until(**{refusal.unit: refusal.asked - refusal.limit})
            if delay is not None:
                return delay
        return RETRY_DELAY_S

    def _sample_queue(self, now: float) -> None:
        stats = self._core.stats()
        self._drain_rate.sample(now, stats.dequeued, stats.dequeued_tokens)

    def _check_accepting(self) -> None:
        if self._draining or self._session_state is EngineState.STOPPED:
            raise DrainingError("the server is draining and takes no new requests", retry_delay=RETRY_DELAY_S)
        if self._info is None:
            raise UnavailableError(f"not ready: {self._session_state.value}", retry_delay=RETRY_DELAY_S)

    def _params(self, request: EngineRequest) -> _core.RequestParams:
        sampling = request.sampling
        prompt_len, limit = len(request.prompt_token_ids), self.max_model_len
        room = limit - prompt_len
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {prompt_len} tokens; at most {limit - 1} fit: the context limit is {limit} tokens and one is generated",
                field="input",
                metadata={"prompt_tokens": str(prompt_len), "max_model_len": str(limit)},
            )
        if request.max_tokens is not None and request.max_tokens > room:
            raise InvalidRequestError(
                f"stop.max_tokens is {request.max_tokens}; only {room} tokens fit behind a prompt of {prompt_len} (context limit {limit})",
                field="stop.max_tokens",
                metadata={"prompt_tokens": str(prompt_len), "max_model_len": str(limit)},
            )
        return _core.RequestParams(
            max_tokens=room if request.max_tokens is None else request.max_tokens,
            eos_token_ids=() if request.ignore_eos else self._eos_token_ids,
            stop_token_ids=request.stop_token_ids,
            min_tokens=request.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed,
            logprobs=request.logprobs,
            logit_bias=tuple(sampling.logit_bias.items()),
            allowed_token_ids=sampling.allowed_token_ids,
            priority=request.priority,
            tenant=request.tenant,
            deadline_ns=0 if request.deadline is None else max(1, int(request.deadline * 1e9)),
            **_cache_use(request),
            **_group(sampling),
        )

    def _release(self, stream: _Stream) -> None:
        """Forget a stream. If the core still works on it, cancel; its last events find no stream and are dropped."""
        self._core_ids.pop(stream.request_id, None)
        self._forget(stream)
        self._cancel(stream)
        if not self._streams:
            self._idle.set()

    def _forget(self, stream: _Stream) -> None:
        for core_id in stream.core_ids:
            self._streams.pop(core_id, None)

    def _cancel(self, stream: _Stream) -> None:
        for index in stream.live:
            self._core.cancel(stream.core_id + index)

    # ---------------------------------------------------------------------------------- events

    def _pump(self) -> None:
        """Deal one batch of the core's events out to the streams. Runs on the loop."""
        tokens = 0
        for event in self._core.poll():
            tokens += len(event.tokens)
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.push(event)
        self._rate.add(tokens)
        now = time.monotonic()
        if self._drain_rate.is_due(now):
            self._sample_queue(now)

    def _delta(self, event: _core.Event, stream: _Stream, request: EngineRequest) -> Delta:
        finish = _FINISHES.get(event.finish)
        if finish is not None and event.finish == _core.FINISH_CANCELLED and self._failure is not None:
            raise self._failure
        if event.finish == _core.FINISH_EOS:
            finish = Finish(FinishReason.STOP, eos_token_id=event.match)
        elif event.finish == _core.FINISH_STOP_TOKEN:
            finish = Finish(FinishReason.STOP, stop_token_id=event.match)
        return Delta(
            token_ids=event.tokens,
            logprobs=event.logprobs,
            ranks=event.ranks,
            finish=finish,
            cached_prompt_tokens=event.cached_tokens,
            timing=_timing(event) if finish else None,
            index=event.request_id - stream.core_id,
            score=event.score if finish and request.sampling.beam_width > 1 else None,
        )

    def _error(self, event: _core.Event, request: EngineRequest) -> EngineError:
        match event.finish:
            case _core.FINISH_DEADLINE:
                waited = f"after {event.queued_ns / 1e9:.3f} s in the queue" if event.queued_ns else "while it waited in the queue"
                return DeadlineError(f"the deadline passed {waited}")
            case _core.FINISH_UNREACHABLE:
                return DeadlineError(
                    f"dropped before its prompt was computed: by the speed measured so far, {len(request.prompt_token_ids)} tokens take at "
                    f"least {event.estimate_ns / 1e9:.3f} s, more than was left until the deadline",
                    metadata={"estimate_s": f"{event.estimate_ns / 1e9:.6f}"},
                )
            case _core.FINISH_NOT_FINITE:
                return RowFailedError(
                    "the model produced logits that are not finite (NaN, or nothing left to choose from) for this request"
                )
            case _core.FINISH_QUARANTINED:
                return QuarantinedError("the request was in two consecutive steps that crashed the data plane; it will not be tried again")
            case _core.FINISH_NEVER_FITS:
                return NeverFitsError("the KV cache of the data plane that took over is too small for this request")
        return self._failure or UnavailableError("the server is stopping", retry_delay=RETRY_DELAY_S)


_FINISHES = {
    _core.FINISH_EOS: Finish(FinishReason.STOP),
    _core.FINISH_STOP_TOKEN: Finish(FinishReason.STOP),
    _core.FINISH_LENGTH: Finish(FinishReason.LENGTH),
    _core.FINISH_CANCELLED: Finish(FinishReason.CANCELLED),
}

_REFUSALS: dict[str, type[EngineError]] = {
    "NEVER_FITS": NeverFitsError,
    "QUEUE_FULL": QueueFullError,
    "DUPLICATE_ID": DuplicateRequestError,
    "PROMPT_TOO_LONG": PromptTooLongError,
    "NO_DATA_PLANE": UnavailableError,
    "STOPPING": DrainingError,
    "EMPTY_PROMPT": InvalidRequestError,
}


def _refused(refusal: _core.Refusal, retry_delay: float) -> EngineError:
    error = _REFUSALS[refusal.reason]
    return error(
        refusal.message,
        retry_delay=retry_delay if error.code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE") else None,
        metadata={"limit": str(refusal.limit), "asked": str(refusal.asked)},
    )


def _cache_use(request: EngineRequest) -> dict[str, Any]:
    """How the request takes part in the prefix cache. The core keeps namespaces apart by 32 bytes, or none for the common one."""
    if not request.prefix_cache:
        return {"cache": False}
    return {"cache_key": hashlib.sha256(request.cache_salt.encode()).digest()} if request.cache_salt else {}


def _group(sampling: SamplingParams) -> dict[str, Any]:
    """The sequences of the request as the core's parameters; a single one is the default."""
    if sampling.beam_width > 1:
        return {
            "beam_width": sampling.beam_width,
            "length_penalty": sampling.length_penalty,
            "early_stopping": int(sampling.early_stopping),
        }
    return {"n": sampling.best_of} if sampling.best_of > 1 else {}


def _timing(event: _core.Event) -> Timing:
    queue, prefill, decode = event.queued_ns / 1e9, event.prefill_ns / 1e9, event.decode_ns / 1e9
    return Timing(queue=queue, prefill=prefill, decode=decode, time_to_first_token=queue + prefill, preemptions=event.preemptions)
