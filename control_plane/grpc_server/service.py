"""twinplane.v1.GenerationService on top of the engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from twinplane.control_plane.grpc_server import convert
from twinplane.control_plane.grpc_server.interceptor import current_request_id, use_request_id
from twinplane.control_plane.grpc_server.prompts import check_shape, limits_of, prompt_ids
from twinplane.control_plane.text.model import ServedModel
from twinplane.control_plane.text.output import OutputOptions, Piece, SequenceOutput
from twinplane.control_plane.types import Delta, EngineError, EngineLike, EngineRequest, InvalidRequestError, Timing
from twinplane.control_plane.validation import check_cache_salt, check_request_id, check_room, resolve_sampling, resolve_stop
from twinplane.shared.log import get_logger
from twinplane.v1 import generation_pb2 as pb
from twinplane.v1 import generation_pb2_grpc

log = get_logger(__name__)

MAX_CANCELLED_IDS = 1024
_FOREVER_S = 365 * 86400.0
_UNFINISHED = "disconnected"  # the outcome of a request that gets to no end of its own


@dataclass
class _Generation:
    """One admitted request: what the engine gets, and what is known of its progress."""

    request: EngineRequest
    output: SequenceOutput
    echo_prompt: bool
    receive_time_ns: int
    cached_prompt_tokens: int = 0
    timing: Timing | None = None
    outcome: str = _UNFINISHED

    def usage(self) -> pb.Usage:
        return pb.Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=self.output.num_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
        )

    def prompt(self) -> pb.PromptInfo:
        ids = self.request.prompt_token_ids
        return pb.PromptInfo(token_count=len(ids), token_ids=ids if self.echo_prompt else ())

    def log_end(self) -> None:
        """One line per request, without a word of its text."""
        timing = self.timing or Timing()
        log.info(
            "request_finished",
            outcome=self.outcome,
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_prompt_tokens=self.cached_prompt_tokens,
            completion_tokens=self.output.num_tokens,
            queue_s=round(timing.queue, 6),
            prefill_s=round(timing.prefill, 6),
            decode_s=round(timing.decode, 6),
            time_to_first_token_s=round(timing.time_to_first_token, 6),
            preemptions=timing.preemptions,
            total_s=round((time.time_ns() - self.receive_time_ns) / 1e9, 6),
        )


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Handlers raise EngineError; :class:`CallInterceptor` turns it into a status."""

    def __init__(self, engine: EngineLike, model: ServedModel) -> None:
        self._engine = engine
        self._model = model

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.GenerateResponse:
        generation = await self._admit(request, context)
        sequence = pb.Sequence()
        texts = []
        async with contextlib.aclosing(self._pieces(generation)) as pieces:
            async for piece in pieces:
                texts.append(piece.text)
                _add_tokens(sequence, piece)
                if piece.finish is not None:
                    sequence.finish.CopyFrom(convert.finish_message(piece.finish))
        sequence.text = "".join(texts)
        return pb.GenerateResponse(
            request_id=generation.request.request_id,
            model=self._model.name,
            sequences=[sequence],
            prompt=generation.prompt(),
            usage=generation.usage(),
            timing=convert.timing_message(generation.timing, generation.receive_time_ns),
            system_fingerprint=self._fingerprint(),
        )

    async def StreamGenerate(
        self, request: pb.StreamGenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        check_shape(request, request.request.chat)
        generation = await self._admit(request.request, context)
        first = True
        async with contextlib.aclosing(self._pieces(generation)) as pieces:
            async for piece in pieces:
                message = pb.StreamGenerateResponse()
                if first:
                    self._introduce(message, generation)
                    first = False
                delta = message.deltas.add(text=piece.text)
                _add_tokens(delta, piece)
                if piece.finish is not None:
                    delta.finish.CopyFrom(convert.finish_message(piece.finish))
                    message.timing.CopyFrom(convert.timing_message(generation.timing, generation.receive_time_ns))
                if piece.finish is not None or request.continuous_usage:
                    message.usage.CopyFrom(generation.usage())
                yield message

    async def CancelGeneration(
        self, request: pb.CancelGenerationRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CancelGenerationResponse:
        if len(request.request_ids) > MAX_CANCELLED_IDS:
            raise InvalidRequestError(
                f"request_ids has {len(request.request_ids)} entries; at most {MAX_CANCELLED_IDS} are allowed", field="request_ids"
            )
        return pb.CancelGenerationResponse(cancelled_request_ids=[name for name in request.request_ids if self._engine.cancel(name)])

    def _introduce(self, message: pb.StreamGenerateResponse, generation: _Generation) -> None:
        message.request_id = generation.request.request_id
        message.model = self._model.name
        message.prompt.CopyFrom(generation.prompt())
        message.system_fingerprint = self._fingerprint()

    def _fingerprint(self) -> str:
        return self._engine.info.fingerprint if self._engine.info is not None else ""

    # ------------------------------------------------------------------------------------ admission

    async def _admit(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> _Generation:
        """Check everything, cheapest first, and tokenize. Raises InvalidRequestError, ModelNotFoundError, PromptTooLongError."""
        receive_time_ns = time.time_ns()
        deadline = _deadline(context)
        if request.request_id:
            use_request_id(check_request_id(request.request_id))
        check_shape(request, request.chat)
        self._model.check_name(request.model)
        limits = limits_of(self._model, self._engine.max_model_len)
        sampling = resolve_sampling(convert.sampling_input(request.sampling), self._model.defaults, limits)
        stop = resolve_stop(convert.stop_input(request.stop), limits)
        cache_salt = check_cache_salt(request.cache_salt)
        prompt = await prompt_ids(self._model, request, limits)
        check_room(len(prompt), stop, limits)
        engine_request = EngineRequest(
            request_id=current_request_id(),
            prompt_token_ids=prompt,
            sampling=sampling,
            max_tokens=stop.max_tokens,
            min_tokens=stop.min_tokens,
            stop_token_ids=stop.stop_token_ids,
            ignore_eos=request.stop.ignore_eos,
            logprobs=request.output.logprobs,
            priority=request.priority,
            deadline=deadline,
            cache_salt=cache_salt,
        )
        options = OutputOptions(
            text=convert.optional(request.output, "text") is not False,
            skip_special_tokens=convert.optional(request.output, "skip_special_tokens") is not False,
            stop_strings=stop.stop_strings,
            include_stop=request.stop.include_stop_in_output,
            min_tokens=stop.min_tokens,
        )
        output = SequenceOutput(self._model.tokenizer, prompt, options)
        return _Generation(engine_request, output, request.output.echo_prompt_tokens, receive_time_ns)

    # ----------------------------------------------------------------------------------- generation

    async def _pieces(self, generation: _Generation) -> AsyncGenerator[Piece, None]:
        """What may be shown, piece by piece; the last one has ``finish``. Closing it cancels the request."""
        try:
            async with contextlib.aclosing(self._engine.generate(generation.request)) as deltas:
                async for delta in deltas:
                    piece = generation.output.push(delta)
                    generation.cached_prompt_tokens = max(generation.cached_prompt_tokens, delta.cached_prompt_tokens)
                    if piece.finish is not None:
                        generation.timing = delta.timing if delta.finish is not None else await self._cancel(generation, deltas)
                        generation.outcome = piece.finish.reason.value
                        yield piece
                        return
                    yield piece
        except EngineError as error:
            generation.outcome = error.reason.lower()
            raise
        finally:
            deadline = generation.request.deadline
            if generation.outcome == _UNFINISHED and deadline is not None and time.monotonic() >= deadline:
                generation.outcome = "deadline_exceeded"  # gRPC ended the call before the engine did
            generation.log_end()

    async def _cancel(self, generation: _Generation, deltas: AsyncGenerator[Delta, None]) -> Timing | None:
        """A stop string was found, of which the engine knows nothing: end the request there, and learn its timing."""
        self._engine.cancel(generation.request.request_id)
        with contextlib.suppress(EngineError):  # the answer is complete: whatever happens now is no failure of it
            async for delta in deltas:
                if delta.finish is not None:
                    return delta.timing
        return None


def _add_tokens(target: Any, piece: Piece) -> None:
    target.token_ids.extend(piece.token_ids)
    if piece.logprobs:
        target.logprobs.values.extend(piece.logprobs)
        target.logprobs.ranks.extend(piece.ranks)


def _deadline(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """The client's gRPC deadline on our monotonic clock. Beyond a year: none (the wire allows
    11,000 years, which 64 bits of nanoseconds do not hold)."""
    remaining = context.time_remaining()
    return None if remaining is None or remaining > _FOREVER_S else time.monotonic() + remaining
