"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc
from twinplane.client import messages
from twinplane.client.errors import error_of
from twinplane.client.retry import Attempts, RetryPolicy
from twinplane.client.types import Chat, Delta, GenerateResult, Load, ModelInfo, Options, Prompt, ServerInfo
from twinplane.v1 import engine_pb2, engine_pb2_grpc, generation_pb2, generation_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

T = TypeVar("T")

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),  # notices a server that vanished without closing the connection
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_retries", 0),  # retried here, by the server's own advice
)


class Client:
    """Talks to one server at ``host:port`` or ``unix:/path``. Thread-safe; close it or use it as a context manager.

    ``tenant``: who asks, up to 64 printable ASCII characters; servers with ``--policy fair`` share their capacity between tenants.

    ``timeout`` arguments are seconds for the whole call, retries included; the server stops working when they are over.
    Every method raises :class:`TwinplaneError`.
    """

    def __init__(self, target: str, *, retry: RetryPolicy | None = None, tenant: str | None = None) -> None:
        self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._generation: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._tokenizer: Any = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._engine: Any = engine_pb2_grpc.EngineServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._retry = retry or RetryPolicy()
        self._metadata = messages.metadata_of(tenant)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---------------------------------------------------------------------------------- generation

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> GenerateResult:
        """The whole answer at once."""
        request = messages.generate_request(prompt, options)
        return messages.result_of(self._call(self._generation.Generate, request, timeout))

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Stream:
        """The answer as it comes: iterate over the deltas. Use it as a context manager to cancel what you do not read."""
        request = generation_pb2.StreamGenerateRequest(request=messages.generate_request(prompt, options))
        attempts = Attempts(self._retry, timeout)
        return Stream(lambda: self._generation.StreamGenerate(request, timeout=attempts.remaining(), metadata=self._metadata), attempts)

    def chat(self, chat: Chat | Sequence[Any], *, timeout: float | None = None, **options: Unpack[Options]) -> GenerateResult:
        """``chat``: a Chat, or just its messages."""
        return self.generate(chat if isinstance(chat, Chat) else Chat(chat), timeout=timeout, **options)

    def cancel(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """End requests by id, whoever sent them; returns those that were live."""
        request = generation_pb2.CancelGenerationRequest(request_ids=request_ids)
        return list(self._call(self._generation.CancelGeneration, request, timeout).cancelled_request_ids)

    # -------------------------------------------------------------------------------- tokenization

    def tokenize(
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
        return list(self._call(self._tokenizer.Tokenize, request, timeout).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True, timeout: float | None = None
    ) -> str:
        request = tokenizer_pb2.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str(self._call(self._tokenizer.Detokenize, request, timeout).text)

    # -------------------------------------------------------------------------------------- server

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        return messages.server_info_of(self._call(self._engine.GetServerInfo, engine_pb2.GetServerInfoRequest(), timeout))

    def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        response = self._call(self._engine.ListModels, engine_pb2.ListModelsRequest(), timeout)
        return [messages.model_info_of(model) for model in response.models]

    def load(self, *, timeout: float | None = None) -> Load:
        return messages.load_of(self._call(self._engine.GetLoad, engine_pb2.GetLoadRequest(), timeout).load)

    def drain(self, grace: float) -> int:
        """Stop admitting and wait, at most ``grace`` seconds, for running requests; returns how many did not finish."""
        request = engine_pb2.DrainRequest()
        request.grace.FromNanoseconds(int(grace * 1e9))
        return int(self._call(self._engine.Drain, request, None).unfinished_requests)

    def reset_prefix_cache(self, *, timeout: float | None = None) -> None:
        """Forget every cached prefix on the server; running requests keep what they use."""
        self._call(self._engine.ResetPrefixCache, engine_pb2.ResetPrefixCacheRequest(), timeout)

    def is_alive(self, *, timeout: float = 5.0) -> bool:
        """The process answers."""
        return self._healthy(messages.ALIVE, timeout)

    def is_ready(self, *, timeout: float = 5.0) -> bool:
        """A request sent now would be served. False also if the server can not be reached within ``timeout`` seconds."""
        return self._healthy(messages.READY, timeout)

    def _healthy(self, service: str, timeout: float) -> bool:
        # Bytes in, bytes out: no serializers.
        check: Any = self._channel.unary_unary(messages.HEALTH_CHECK)
        try:
            return messages.is_serving(check(messages.health_request(service), timeout=timeout))
        except grpc.RpcError:
            return False

    def _call(self, method: Callable[..., T], request: Any, timeout: float | None) -> T:
        attempts = Attempts(self._retry, timeout)
        while True:
            try:
                return method(request, timeout=attempts.remaining(), metadata=self._metadata)
            except grpc.RpcError as error:
                failure = error_of(error)
            time.sleep(attempts.pause(failure))


class Stream:
    """Iterates over the deltas of one generation.

    ``request_id``, ``model`` and ``prompt_tokens`` are known after the first delta. Not thread-safe, but ``cancel`` may be
    called from any thread.
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

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while True:
            if (delta := self._collector.take()) is not None:
                return delta
            try:
                self._collector.add(next(self._call))
                continue
            except grpc.RpcError as error:
                if self._cancelled:
                    raise StopIteration from None
                failure = error_of(error)
            if self._collector.deltas:
                raise failure  # begun: starting over would repeat tokens
            time.sleep(self._attempts.pause(failure))
            if self._cancelled:
                raise StopIteration
            self._call = self._start()

    def result(self) -> GenerateResult:
        """Read to the end and return everything, what was iterated over before included."""
        for _ in self:
            pass
        return self._collector.result()

    def cancel(self) -> None:
        """Stop the generation; the iteration ends."""
        self._cancelled = True
        self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()
