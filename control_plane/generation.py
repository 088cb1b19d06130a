"""One admitted request on its way through the engine: deltas of several sequences become pieces of several texts.

No protobuf here: every front (gRPC, HTTP) drives a :class:`Generation` and puts its pieces into messages of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field, replace

from twinplane.control_plane.text.output import OutputOptions, Piece, SequenceOutput
from twinplane.control_plane.text.tokenizer import Tokenizer
from twinplane.control_plane.types import Delta, EngineError, EngineLike, EngineRequest, Finish, Timing
from twinplane.shared.log import get_logger

log = get_logger(__name__)

_UNFINISHED = "disconnected"  # the outcome of a request that gets to no end of its own


@dataclass
class Answer:
    """A whole sequence, put together from its pieces."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    finish: Finish | None = None
    score: float | None = None  # of a beam search's hypothesis; with best_of, the mean log-probability


class Generation:
    """What the engine gets, and what is known of its progress.

    Sequences are numbered as the client sees them: 0 up to ``sampling.n`` (all ``best_of`` samples while it is not yet
    known which of them are the best).
    """

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer, options: OutputOptions, *, receive_time_ns: int) -> None:
        sampling = request.sampling
        self._choose = sampling.beam_width == 1 and sampling.best_of > sampling.n
        self._logprobs = request.logprobs
        self.request = replace(request, logprobs=True) if self._choose else request
        self.receive_time_ns = receive_time_ns
        count = sampling.best_of if self._choose else sampling.n
        self._outputs = [SequenceOutput(tokenizer, request.prompt_token_ids, options) for _ in range(count)]
        self.completion_tokens = 0  # of the sequences the client gets
        self.cached_prompt_tokens = 0
        self.timing: Timing | None = None
        self.outcome = _UNFINISHED

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    # ------------------------------------------------------------------------------------- output

    async def pieces(self, engine: EngineLike) -> AsyncGenerator[list[Piece], None]:
        """What may be shown, at most one piece a sequence; the last list ends the last sequence. Closing it cancels the request.

        Raises what ``engine.generate`` raises.
        """
        try:
            async with contextlib.aclosing(engine.generate(self.request)) as stream:
                async for deltas in stream:
                    pieces = self._push(engine, deltas)
                    if all(output.finish is not None for output in self._outputs):
                        await self._drain(stream)
                        self.outcome = _outcome(self._outputs)
                        yield pieces
                        return
                    if pieces:
                        yield pieces
        except EngineError as error:
            self.outcome = error.reason.lower()
            raise
        finally:
            deadline = self.request.deadline
            if self.outcome == _UNFINISHED and deadline is not None and time.monotonic() >= deadline:
                self.outcome = "deadline_exceeded"  # the front ended the call before the engine did
            self._log_end()

    def _push(self, engine: EngineLike, deltas: Iterable[Delta]) -> list[Piece]:
        pieces = []
        for delta in deltas:
            self._note(delta)
            if delta.index >= len(self._outputs):
                continue  # a hypothesis beyond those asked for
            output = self._outputs[delta.index]
            if output.finish is not None:
                continue  # what came after its stop string
            piece = output.push(delta)
            if piece.finish is not None and delta.finish is None:
                engine.cancel_sequence(self.request.request_id, delta.index)  # it knows nothing of stop strings
            self.completion_tokens += len(piece.token_ids)
            pieces.append(piece)
        return pieces

    async def _drain(self, stream: AsyncGenerator[list[Delta], None]) -> None:
        """All texts are complete, but the engine may not have ended yet, where stop strings were found: learn its timing."""
        with contextlib.suppress(EngineError):  # the answer is complete: whatever happens now is no failure of it
            async for deltas in stream:
                for delta in deltas:
                    self._note(delta)

    def _note(self, delta: Delta) -> None:
        self.cached_prompt_tokens = max(self.cached_prompt_tokens, delta.cached_prompt_tokens)
        if delta.timing is not None:
            self.timing = delta.timing if self.timing is None else self.timing.merged(delta.timing)

    async def answers(self, engine: EngineLike) -> list[Answer]:
        """Whole sequences in the client's order: by index, hypotheses and the best of several samples best first."""
        answers = [Answer(index) for index in range(len(self._outputs))]
        texts: list[list[str]] = [[] for _ in answers]
        async with contextlib.aclosing(self.pieces(engine)) as stream:
            async for pieces in stream:
                for piece in pieces:
                    answer = answers[piece.index]
                    texts[piece.index].append(piece.text)
                    answer.token_ids += piece.token_ids
                    answer.logprobs += piece.logprobs
                    answer.ranks += piece.ranks
                    answer.finish, answer.score = piece.finish, piece.score
        for answer in answers:
            answer.text = "".join(texts[answer.index])
        return self._best(answers) if self._choose else answers

    def _best(self, answers: Sequence[Answer]) -> list[Answer]:
        """The n samples with the highest mean log-probability, best first, numbered anew."""
        for answer in answers:
            answer.score = sum(answer.logprobs) / len(answer.logprobs) if answer.logprobs else -float("inf")
        best = sorted(answers, key=lambda answer: -(answer.score or 0.0))[: self.request.sampling.n]  # stable: ties by index
        for index, answer in enumerate(best):
            answer.index = index
            if not self._logprobs:
                answer.logprobs, answer.ranks = [], []
        self.completion_tokens = sum(len(answer.token_ids) for answer in best)
        return best

    def _log_end(self) -> None:
        """One line per request, without a word of its text."""
        timing = self.timing or Timing()
        log.info(
            "request_finished",
            outcome=self.outcome,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            sequences=self.request.sampling.num_sequences,
            completion_tokens=sum(output.num_tokens for output in self._outputs),
            queue_s=round(timing.queue, 6),
            prefill_s=round(timing.prefill, 6),
            decode_s=round(timing.decode, 6),
            time_to_first_token_s=round(timing.time_to_first_token, 6),
            preemptions=timing.preemptions,
            total_s=round((time.time_ns() - self.receive_time_ns) / 1e9, 6),
        )


def _outcome(outputs: Iterable[SequenceOutput]) -> str:
    """The sequences' reasons to finish, each once."""
    return "+".join(sorted({output.finish.reason.value for output in outputs if output.finish is not None}))
