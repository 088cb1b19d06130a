"""An engine that needs no core and no model: it says what a test tells it to, at the pace of the test.

Like the real one it produces whether or not anybody reads, merges what a slow reader has not taken, ends a request
when its iterator is closed, and honours deadlines. It satisfies ``twinplane.control_plane.types.EngineLike``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from twinplane.control_plane.types import (
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
    Load,
    QueueFullError,
    Timing,
)

INFO = EngineInfo(
    device="cpu", dtype="float32", kv_dtype="float32", block_size=16, num_blocks=256, max_model_len=2048, vocab_size=512, fingerprint="f00d"
)


@dataclass
class Live:
    """One request between its submission and its last delta."""

    request: EngineRequest
    pending: dict[int, Delta] = field(default_factory=dict)  # by sequence
    error: EngineError | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    produced: int = 0  # tokens, of all sequences

    def put(self, delta: Delta) -> None:
        if delta.index in self.ended:
            return
        earlier = self.pending.get(delta.index)
        if earlier is not None:
            delta.token_ids = earlier.token_ids + delta.token_ids
            delta.logprobs = earlier.logprobs + delta.logprobs
            delta.ranks = earlier.ranks + delta.ranks
        self.pending[delta.index] = delta
        if delta.finish is not None:
            self.ended.add(delta.index)
        self.wake.set()

    def cancel(self, index: int) -> None:
        self.cancelled.add(index)
        self.put(Delta([], finish=Finish(FinishReason.CANCELLED), timing=Timing(queue=0.25), index=index))


class FakeEngine:
    """``answer`` gives the tokens of a request (of ``answers``, those of its sequence of that number, if there is one); what exceeds
    its limits is cut. ``step_s``: seconds per token.

    ``slots``: requests that run at once; ``queue``: how many more may wait.
    """

    def __init__(
        self,
        answer: Callable[[EngineRequest], Sequence[int]] = lambda request: [10, 11, 12],
        *,
        eos: int | None = None,
        step_s: float = 0.0,
        slots: int = 1000,
        queue: int = 1000,
        max_model_len: int = 2048,
        tokens_per_delta: int = 1,
        cached_prompt_tokens: int = 0,
    ) -> None:
        self.answer = answer
        self.answers: list[Sequence[int]] = []
        self.resets = 0
        self.eos = eos
        self.step_s = step_s
        self.queue = queue
        self.tokens_per_delta = tokens_per_delta
        self.cached_prompt_tokens = cached_prompt_tokens
        self.max_model_len = max_model_len
        self.info: EngineInfo | None = INFO
        self.requests: list[EngineRequest] = []
        self.scheduled: list[str] = []
        self.closed: list[str] = []  # iterators closed before their end
        self.live: dict[str, Live] = {}
        self.most_pending = 0
        self._slots = asyncio.Semaphore(slots)
        self._waiting = 0
        self._state = EngineState.READY
        self._changed = asyncio.Event()
        self._end: EngineError | None = None

    # ------------------------------------------------------------------------------------- state

    @property
    def state(self) -> EngineState:
        return self._state

    def set_state(self, state: EngineState) -> None:
        self._state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def watch_state(self) -> AsyncIterator[EngineState]:
        last = None
        while True:
            changed = self._changed
            if self._state is not last:
                last = self._state
                yield last
            else:
                await changed.wait()

    def load(self) -> Load:
        return Load(
            running_requests=len(self.live) - self._waiting,
            waiting_requests=self._waiting,
            waiting_prompt_tokens=0,
            used_kv_blocks=len(self.live),
            total_kv_blocks=INFO.num_blocks,
            generated_tokens_per_second=0.0,
            scheduler_steps=7,
            seconds_since_last_step=0.5,
            cached_kv_blocks=3,
            prefix_cache_hit_rate=0.25,
        )

    async def drain(self, grace: float) -> int:
        self.set_state(EngineState.DRAINING)
        deadline = time.monotonic() + grace
        while self.live and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._end = DrainingError("the grace is over", retry_delay=1.0)
        unfinished = list(self.live.values())
        for live in unfinished:
            live.error = self._end
            live.wake.set()
        return len(unfinished)

    # ---------------------------------------------------------------------------------- requests

    def cancel(self, request_id: str) -> bool:
        live = self.live.get(request_id)
        if live is None:
            return False
        for index in range(live.request.sampling.num_sequences):
            live.cancel(index)
        return True

    def cancel_sequence(self, request_id: str, index: int) -> None:
        self.live[request_id].cancel(index)

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[Delta], None]:
        if self._state is EngineState.DRAINING:
            raise DrainingError("draining", retry_delay=2.5)
        if request.request_id in self.live:
            raise DuplicateRequestError(f"request id {request.request_id} is live", field="request_id")
        if self._slots.locked() and self._waiting >= self.queue:
            raise QueueFullError(f"{self._waiting} requests wait; the limit is {self.queue}", retry_delay=0.05)
        self.requests.append(request)
        live = self.live[request.request_id] = Live(request)
        producer = asyncio.create_task(self._produce(live))
        ended = False
        try:
            while not ended:
                await live.wake.wait()
                live.wake.clear()
                if live.error is not None:
                    ended = True
                    raise live.error
                deltas, live.pending = live.pending, {}
                ended = len(live.ended) == request.sampling.num_sequences
                yield [deltas[index] for index in sorted(deltas)]
        finally:
            if not ended:
                self.closed.append(request.request_id)
            producer.cancel()
            self.live.pop(request.request_id, None)

    async def _produce(self, live: Live) -> None:
        request = live.request
        self._waiting += 1
        try:
            timeout = None if request.deadline is None else max(0.0, request.deadline - time.monotonic())
            await asyncio.wait_for(self._slots.acquire(), timeout)
        except TimeoutError:
            live.error = DeadlineError("the deadline passed in the queue")
            live.wake.set()
            return
        finally:
            self._waiting -= 1
        self.scheduled.append(request.request_id)
        try:
            await self._run(live)
        except EngineError as error:
            live.error = error
            live.wake.set()
        finally:
            self._slots.release()

    async def _run(self, live: Live) -> None:
        """All sequences side by side, a token (or ``tokens_per_delta``) each at a time; beams only at the end."""
        request = live.request
        count = request.sampling.num_sequences
        room = self.max_model_len - len(request.prompt_token_ids)
        limit = room if request.max_tokens is None else request.max_tokens
        default = list(self.answer(request))
        answers = [list(self.answers[i] if i < len(self.answers) else default)[:limit] for i in range(count)]
        size = limit if request.sampling.beam_width > 1 else self.tokens_per_delta
        for start in range(0, max(map(len, answers)), size):
            await asyncio.sleep(self.step_s)
            for index, answer in enumerate(answers):
                if index not in live.cancelled and start < len(answer):
                    self._step(live, index, answer, start, size, limit)
            if len(live.ended) == count:
                return

    def _step(self, live: Live, index: int, answer: list[int], start: int, size: int, limit: int) -> None:
        tokens, finish = answer[start : start + size], None
        for offset, token in enumerate(tokens):
            finish = self._finish(token, live.request, last=start + offset + 1 == limit)
            if finish is not None:
                tokens = tokens[: offset + 1]
                break
        if finish is None and start + size >= len(answer):
            finish = Finish(FinishReason.LENGTH)
        live.produced += len(tokens)
        live.put(self._delta(live, index, tokens, finish))
        self.most_pending = max([self.most_pending, *(len(delta.token_ids) for delta in live.pending.values())])

    def _finish(self, token: int, request: EngineRequest, *, last: bool) -> Finish | None:
        if token == self.eos and not request.ignore_eos:
            return Finish(FinishReason.STOP, eos_token_id=token)
        if token in request.stop_token_ids:
            return Finish(FinishReason.STOP, stop_token_id=token)
        return Finish(FinishReason.LENGTH) if last else None

    def _delta(self, live: Live, index: int, tokens: list[int], finish: Finish | None) -> Delta:
        timing = Timing(queue=0.25, prefill=0.5, decode=0.75, time_to_first_token=0.75, preemptions=2) if finish else None
        wanted = live.request.logprobs
        return Delta(
            tokens,
            logprobs=[-0.5 - token / 1024 for token in tokens] if wanted else [],
            ranks=[1 + token for token in tokens] if wanted else [],
            finish=finish,
            cached_prompt_tokens=self.cached_prompt_tokens,
            timing=timing,
            index=index,
            score=-0.5 - index if finish and live.request.sampling.beam_width > 1 else None,
        )
