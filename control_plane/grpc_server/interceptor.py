"""What every call of our own services has in common, in one place.

A request id that is checked, logged and returned; a request that is not valid protobuf refused as the client's fault;
errors turned into statuses; and, when the server stops, an explicit end for calls that are still open.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from twinplane.control_plane.grpc_server.status import REQUEST_ID, status_of
from twinplane.control_plane.types import EngineError, InvalidRequestError
from twinplane.control_plane.validation import check_request_id
from twinplane.shared.log import Limiter, get_logger

log = get_logger(__name__)

OUR_SERVICES = "/twinplane.v1."
# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")

# The id of the call that the current task serves. A request that names its own replaces it (`use_request_id`).
_request_id: ContextVar[str] = ContextVar("request_id", default="")


def current_request_id() -> str:
    return _request_id.get()


def use_request_id(request_id: str) -> None:
    """Make ``request_id`` the id of the current call, in logs and response metadata alike."""
    _request_id.set(request_id)
    structlog.contextvars.bind_contextvars(request_id=request_id)


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request that could not be parsed. (Raising in the deserializer would be reported as INTERNAL.)"""


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Handlers of our services may raise EngineError; anything else they raise is a bug, reported as INTERNAL."""

    def __init__(self) -> None:
        self._calls: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._end_error: EngineError | None = None
        self._refusals = Limiter()  # a server that refuses thousands must not drown in saying so

    async def finish(self, grace: float, error: EngineError) -> int:
        """Wait until no call is open, at most ``grace`` seconds; then end the rest with ``error``. Returns their number."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace)
        self._end_error = error
        unfinished = list(self._calls)
        for task in unfinished:
            task.cancel()
        return len(unfinished)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OUR_SERVICES):
            return handler
        metadata = {key: value for key, value in handler_call_details.invocation_metadata or () if isinstance(value, str)}
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(handler.unary_stream, method, metadata),
                request_deserializer=_tolerant(handler.request_deserializer),
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(handler.unary_unary, method, metadata),
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _unary(self, behaviour: Any, method: str, metadata: dict[str, str]) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async with self._guard(request, context, method, metadata):
                response = await behaviour(request, context)
                await context.send_initial_metadata(((REQUEST_ID, current_request_id()),))
                return response

        return call

    def _streaming(self, behaviour: Any, method: str, metadata: dict[str, str]) -> Any:
        # A coroutine that writes, not an asynchronous generator: so the end of the client always arrives here as
        # CancelledError, and the handler is closed at once rather than by the garbage collector.
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async with self._guard(request, context, method, metadata), contextlib.aclosing(behaviour(request, context)) as responses:
                first = True
                async for response in responses:
                    if first:
                        # Not before there is something to say: until headers are sent, gRPC's own retries may act.
                        await context.send_initial_metadata(((REQUEST_ID, current_request_id()),))
                        first = False
                    await context.write(response)

        return call

    @contextlib.asynccontextmanager
    async def _guard(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any], method: str, metadata: dict[str, str]
    ) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        self._idle.clear()
        try:
            _bind(method, metadata)
            if isinstance(request, _Malformed):
                raise InvalidRequestError(f"the request of {method} is not valid protobuf, or one of its strings is not UTF-8")
            yield
        except EngineError as error:
            self._refusals.log(log.info, "call_failed", key=(method, error.reason), reason=error.reason, field=error.field)
            await context.abort_with_status(status_of(error, current_request_id()))
        except asyncio.CancelledError:
            if self._end_error is None:
                raise  # the client cancelled, went away or ran out of time
            task.uncancel()
            await context.abort_with_status(status_of(self._end_error, current_request_id()))
        except Exception:
            log.exception("call_crashed")
            bug = EngineError(f"internal error; the server's log has it under request id {current_request_id()}")
            await context.abort_with_status(status_of(bug, current_request_id()))
        finally:
            self._calls.discard(task)
            if not self._calls:
                self._idle.set()


def _bind(method: str, metadata: dict[str, str]) -> None:
    """Start the call's logging context. Raises InvalidRequestError for an id that must not be echoed."""
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(method=method)
    if trace := _TRACEPARENT.fullmatch(metadata.get("traceparent", "")):
        structlog.contextvars.bind_contextvars(trace_id=trace[1], span_id=trace[2])
    use_request_id(uuid.uuid4().hex)
    if REQUEST_ID in metadata:
        use_request_id(check_request_id(metadata[REQUEST_ID], field=REQUEST_ID))


def _tolerant(deserialize: Any) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:
            return _Malformed()

    return parse
