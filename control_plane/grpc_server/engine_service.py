"""twinplane.v1.EngineService: introspection and administration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import grpc
from twinplane.control_plane.text.model import ServedModel
from twinplane.control_plane.types import EngineLike, InvalidRequestError
from twinplane.control_plane.validation import describe_defaults
from twinplane.shared.log import get_logger
from twinplane.v1 import engine_pb2 as pb
from twinplane.v1 import engine_pb2_grpc

log = get_logger(__name__)

DEFAULT_GRACE_S = 30.0
MAX_GRACE_S = 3600.0


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """``contracts``: full names of the services on this server."""

    def __init__(self, engine: EngineLike, model: ServedModel, *, instance_id: str, contracts: Sequence[str]) -> None:
        self._engine = engine
        self._model = model
        self._instance_id = instance_id
        self._contracts = tuple(contracts)
        self._start_time_ns = time.time_ns()

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetServerInfoResponse:
        response = pb.GetServerInfoResponse(
            version=metadata.version("twinplane"),
            instance_id=self._instance_id,
            contracts=self._contracts,
            state=self._engine.state.value,
        )
        response.start_time.FromNanoseconds(self._start_time_ns)
        if (info := self._engine.info) is not None:
            response.device, response.dtype, response.kv_dtype = info.device, info.dtype, info.kv_dtype
            response.kv_block_size, response.kv_block_count = info.block_size, info.num_blocks
            response.system_fingerprint = info.fingerprint
        return response

    async def ListModels(self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.ListModelsResponse:
        model = self._model
        entry = pb.ModelInfo(
            name=model.name,
            aliases=model.aliases,
            max_model_len=self._engine.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            architecture=model.architecture,
            has_chat_template=model.tokenizer.has_chat_template,
        )
        entry.default_sampling.update(describe_defaults(model.defaults))
        return pb.ListModelsResponse(models=[entry])

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.GetLoadResponse:
        load = self._engine.load()
        message = pb.Load(
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            waiting_prompt_tokens=load.waiting_prompt_tokens,
            used_kv_blocks=load.used_kv_blocks,
            total_kv_blocks=load.total_kv_blocks,
            generated_tokens_per_second=load.generated_tokens_per_second,
            scheduler_steps=load.scheduler_steps,
            cached_kv_blocks=load.cached_kv_blocks,
            prefix_cache_hit_rate=load.prefix_cache_hit_rate,
        )
        message.time.FromNanoseconds(time.time_ns())
        if load.seconds_since_last_step is not None:
            message.since_last_step.FromNanoseconds(int(load.seconds_since_last_step * 1e9))
        return pb.GetLoadResponse(load=message)

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.DrainResponse:
        grace = request.grace.seconds + request.grace.nanos / 1e9 if request.HasField("grace") else DEFAULT_GRACE_S
        if not 0 <= grace <= MAX_GRACE_S:
            raise InvalidRequestError(f"grace is {grace:g} s; it must be from 0 to {MAX_GRACE_S:g} s", field="grace")
        log.info("drain_requested", grace_s=grace)
        return pb.DrainResponse(unfinished_requests=await self._engine.drain(grace))

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ResetPrefixCacheResponse:
        await self._engine.reset_prefix_cache()
        log.info("prefix_cache_reset")
        return pb.ResetPrefixCacheResponse()
