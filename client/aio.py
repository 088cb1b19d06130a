"""The asyncio client; the same surface as :class:`twinplane.client.Client`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
import grpc.aio
from twinplane.client import messages
from twinplane.client.errors import error_of
from twinplane.client.retry import Attempts, RetryPolicy
from twinplane.client.sync import CHANNEL_OPTIONS
from twinplane.client.types import Chat, Delta, GenerateResult, Load, ModelInfo, Options, Prompt, ServerInfo
from twinplane.v1 import engine_pb2, engine_pb2_grpc, generation_pb2, generation_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc


class AsyncClient:
    """Talks to one server at ``host:port`` or ``unix:/path``, on one event loop. Close it or use it with ``async with``.

    ``tenant``: who asks, up to 64 printable ASCII characters; servers with ``--policy fair`` share their capacity between tenants.

    ``timeout`` arguments are seconds for the whole call, retries included; the server stops working when they are over.
    Cancelling the task that awaits a call cancels it on the server. Every method raises :class:`TwinplaneError`.
    """

    def __init__(self, target: str, *, retry: RetryPolicy | None = None, tenant: str | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._generation: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._tokenizer: Any = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._engine: Any = engine_pb2_grpc.EngineServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._retry = retry or RetryPolicy()
        self._metadata = messages.metadata_of(tenant)
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()

    async def close(self) -> None:
        """Also cancels streams that are still open. (Not every version of grpc.aio does that when its channel closes.)"""
        for stream in list(self._streams):
            stream.cancel()
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # ---------------------------------------------------------------------------------- generation

    async def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> GenerateResult:
        """The whole answer at once."""
        request = messages.generate_request(prompt, options)
        return messages.result_of(await self._call(self._generation.Generate, request, timeout))

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> AsyncStream:
        """The answer as it comes: iterate over the deltas. Use it with ``async with`` to cancel what you do not read."""
        request = generation_pb2.StreamGenerateRequest(request=messages.generate_request(prompt, options))
        attempts = Attempts(self._retry, timeout)
        stream = AsyncStream(
            lambda: self._generation.StreamGenerate(request, timeout=attempts.remaining(), metadata=self._metadata), attempts
        )
        self._streams.add(stream)
        return stream

    async def chat(self, chat: Chat | Sequence[Any], *, timeout: float | None = None, **options: Unpack[Options]) -> GenerateResult:
        """``chat``: a Chat, or just its messages."""
        return await self.generate(chat if isinstance(chat, Chat) else Chat(chat), timeout=timeout, **options)

    async def cancel(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """End requests by id, whoever sent them; returns those that were live."""
        request = generation_pb2.CancelGenerationRequest(request_ids=request_ids)
        return list((await self._call(self._generation.CancelGeneration, request, timeout)).cancelled_request_ids)

    # -------------------------------------------------------------------------------- tokenization

    async def tokenize(
        self,
        prompt: str | Chat,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        parse_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """The token ids a generation would get as its prompt."""
        request = messages.tokenize_request(
            prompt, model=model, add_special_tokens=add_special_tokens, parse_special_tokens=parse_special_tokens
        )
        return list((await self._call(self._tokenizer.Tokenize, request, timeout)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True, timeout: float | None = None
    ) -> str:
        request = tokenizer_pb2.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._call(self._tokenizer.Detokenize, request, timeout)).text)

    # -------------------------------------------------------------------------------------- server

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        return messages.server_info_of(await self._call(self._engine.GetServerInfo, engine_pb2.GetServerInfoRequest(), timeout))

    async def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        response = await self._call(self._engine.ListModels, engine_pb2.ListModelsRequest(), timeout)
        return [messages.model_info_of(model) for model in response.models]

    async def load(self, *, timeout: float | None = None) -> Load:
        return messages.load_of((await self._call(self._engine.GetLoad, engine_pb2.GetLoadRequest(), timeout)).load)

    async def drain(self, grace: float) -> int:
        """Stop admitting and wait, at most ``grace`` seconds, for running requests; returns how many did not finish."""
        request = engine_pb2.DrainRequest()
        request.grace.FromNanoseconds(int(grace * 1e9))
        return int((await self._call(self._engine.Drain, request, None)).unfinished_requests)

    async def reset_prefix_cache(self, *, timeout: float | None = None) -> None:
        """Forget every cached prefix on the server; running requests keep what they use."""
        await self._call(self._engine.ResetPrefixCache, engine_pb2.ResetPrefixCacheRequest(), timeout)

    async def is_alive(self, *, timeout: float = 5.0) -> bool:
        """The process answers."""
        return await self._healthy(messages.ALIVE, timeout)

    async def is_ready(self, *, timeout: float = 5.0) -> bool:
        """A request sent now would be served. False also if the server can not be reached within ``timeout`` seconds."""
        return await self._healthy(messages.READY, timeout)

    async def _healthy(self, service: str, timeout: float) -> bool:
        # Bytes in, bytes out: no serializers.
        check: Any = self._channel.unary_unary(messages.HEALTH_CHECK)
        try:
            return messages.is_serving(await check(messages.health_request(service), timeout=timeout))
        except grpc.RpcError:
            return False

    async def _call(self, method: Callable[..., Any], request: Any, timeout: float | None) -> Any:
        attempts = Attempts(self._retry, timeout)
        while True:
            try:
                return await method(request, timeout=attempts.remaining(), metadata=self._metadata)
            except grpc.RpcError as error:
                failure = error_of(error)
            await asyncio.sleep(attempts.pause(failure))


class AsyncStream:
    """Iterates over the deltas of one generation.

    ``request_id``, ``model`` and ``prompt_tokens`` are known after the first delta.
    """

    def __init__(self, start: Callable[[], Any], attempts: Attempts) -> None:
        self._start = start
        self._attempts = attempts
        self._collector = messages.Collector()
        self._cancelled = False
        self._call = start()

    @property
    def request_id(self) -> str:
        return self._collector.opening.request_id

    @property
    def model(self) -> str:
        return self._collector.opening.model

    @property
    def prompt_tokens(self) -> int:
        return self._collector.opening.prompt.token_count

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while True:
            if (delta := self._collector.take()) is not None:
                return delta
            try:
                response = await self._call.read()
                if response is grpc.aio.EOF:
                    raise StopAsyncIteration
                self._collector.add(response)
                continue
            except grpc.RpcError as error:
                if self._cancelled:
                    raise StopAsyncIteration from None
                failure = error_of(error)
            except asyncio.CancelledError:
                # grpc.aio says so of a cancelled call; only if it is not ours was this task cancelled.
                if self._cancelled:
                    raise StopAsyncIteration from None
                raise
            if self._collector.deltas:
                raise failure  # begun: starting over would repeat tokens
            await asyncio.sleep(self._attempts.pause(failure))
            if self._cancelled:
                raise StopAsyncIteration
            self._call = self._start()

    async def result(self) -> GenerateResult:
        """Read to the end and return everything, what was iterated over before included."""
        async for _ in self:
            pass
        return self._collector.result()

    def cancel(self) -> None:
        """Stop the generation; the iteration ends."""
        self._cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()
