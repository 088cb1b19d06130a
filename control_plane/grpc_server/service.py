"""twinplane.v1.GenerationService on top of the engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from twinplane.control_plane.generation import Generation
from twinplane.control_plane.grpc_server import convert
from twinplane.control_plane.grpc_server.interceptor import current_request_id, use_request_id
from twinplane.control_plane.grpc_server.prompts import check_shape, limits_of, prompt_ids
from twinplane.control_plane.text.model import ServedModel
from twinplane.control_plane.text.output import OutputOptions
from twinplane.control_plane.types import EngineLike, EngineRequest, InvalidRequestError
from twinplane.control_plane.validation import (
    check_beams,
    check_cache_salt,
    check_request_id,
    check_room,
    check_streamable,
    check_tenant,
    resolve_sampling,
    resolve_stop,
)
from twinplane.v1 import generation_pb2 as pb
from twinplane.v1 import generation_pb2_grpc

MAX_CANCELLED_IDS = 1024
TENANT = "x-twinplane-tenant"
_FOREVER_S = 365 * 86400.0


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Handlers raise EngineError; :class:`CallInterceptor` turns it into a status."""

    def __init__(self, engine: EngineLike, model: ServedModel) -> None:
        self._engine = engine
        self._model = model

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.GenerateResponse:
        generation = await self._admit(request, context)
        answers = await generation.answers(self._engine)
        return pb.GenerateResponse(
            request_id=generation.request.request_id,
            model=self._model.name,
            sequences=[convert.filled(pb.Sequence(index=answer.index, text=answer.text), answer) for answer in answers],
            prompt=_prompt(generation, request),
            usage=_usage(generation),
            timing=convert.timing_message(generation.timing, generation.receive_time_ns),
            system_fingerprint=self._fingerprint(),
        )

    async def StreamGenerate(
        self, request: pb.StreamGenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        check_shape(request, request.request.chat)
        generation = await self._admit(request.request, context, streaming=True)
        first = True
        unfinished = generation.request.sampling.n
        async with contextlib.aclosing(generation.pieces(self._engine)) as stream:
            async for pieces in stream:
                message = pb.StreamGenerateResponse()
                if first:
                    self._introduce(message, generation, request.request)
                    first = False
                for piece in pieces:
                    convert.filled(message.deltas.add(index=piece.index, text=piece.text), piece)
                unfinished -= sum(piece.finish is not None for piece in pieces)
                if not unfinished:
                    message.timing.CopyFrom(convert.timing_message(generation.timing, generation.receive_time_ns))
                if not unfinished or request.continuous_usage:
                    message.usage.CopyFrom(_usage(generation))
                yield message

    async def CancelGeneration(
        self, request: pb.CancelGenerationRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CancelGenerationResponse:
        if len(request.request_ids) > MAX_CANCELLED_IDS:
            raise InvalidRequestError(
                f"request_ids has {len(request.request_ids)} entries; at most {MAX_CANCELLED_IDS} are allowed", field="request_ids"
            )
        return pb.CancelGenerationResponse(cancelled_request_ids=[name for name in request.request_ids if self._engine.cancel(name)])

    def _introduce(self, message: pb.StreamGenerateResponse, generation: Generation, request: pb.GenerateRequest) -> None:
        message.request_id = generation.request.request_id
        message.model = self._model.name
        message.prompt.CopyFrom(_prompt(generation, request))
        message.system_fingerprint = self._fingerprint()

    def _fingerprint(self) -> str:
        return self._engine.info.fingerprint if self._engine.info is not None else ""

    # ------------------------------------------------------------------------------------ admission

    async def _admit(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any], *, streaming: bool = False
    ) -> Generation:
        """Check everything, cheapest first, and tokenize. Raises InvalidRequestError, ModelNotFoundError, PromptTooLongError."""
        receive_time_ns = time.time_ns()
        deadline = _deadline(context)
        if request.request_id:
            use_request_id(check_request_id(request.request_id))
        tenant = check_tenant(_tenant(context))
        check_shape(request, request.chat)
        self._model.check_name(request.model)
        limits = limits_of(self._model, self._engine.max_model_len)
        sampling = resolve_sampling(convert.sampling_input(request.sampling), self._model.defaults, limits)
        stop = resolve_stop(convert.stop_input(request.stop), limits)
        check_beams(sampling, stop, logprobs=request.output.logprobs)
        if streaming:
            check_streamable(sampling)
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
            prefix_cache=convert.optional(request, "prefix_cache") is not False,
            tenant=tenant,
        )
        options = OutputOptions(
            text=convert.optional(request.output, "text") is not False,
            skip_special_tokens=convert.optional(request.output, "skip_special_tokens") is not False,
            stop_strings=stop.stop_strings,
            include_stop=request.stop.include_stop_in_output,
            min_tokens=stop.min_tokens,
        )
        return Generation(engine_request, self._model.tokenizer, options, receive_time_ns=receive_time_ns)


def _usage(generation: Generation) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=generation.prompt_tokens,
        completion_tokens=generation.completion_tokens,
        cached_prompt_tokens=generation.cached_prompt_tokens,
    )


def _prompt(generation: Generation, request: pb.GenerateRequest) -> pb.PromptInfo:
    ids = generation.request.prompt_token_ids
    return pb.PromptInfo(token_count=len(ids), token_ids=ids if request.output.echo_prompt_tokens else ())


def _tenant(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Who asks, by the metadata; "" if it does not say."""
    metadata = context.invocation_metadata() or ()
    return next((value for key, value in metadata if key == TENANT and isinstance(value, str)), "")


def _deadline(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """The client's gRPC deadline on our monotonic clock. Beyond a year: none (the wire allows
    11,000 years, which 64 bits of nanoseconds do not hold)."""
    remaining = context.time_remaining()
    return None if remaining is None or remaining > _FOREVER_S else time.monotonic() + remaining
