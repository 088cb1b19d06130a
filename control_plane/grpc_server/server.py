"""The gRPC server: address, options, health, and stopping without cutting anybody off silently.

The order at the end of a life (``SIGTERM``)::

    withdraw()      readiness NOT_SERVING, requests still served: load balancers take us out
    drain(grace)    new requests UNAVAILABLE + RetryInfo; live ones finish, or end with UNAVAILABLE after `grace`
    stop()          Watch streams end, open calls are told, listener closed
"""

from __future__ import annotations

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from twinplane.control_plane.grpc_server.engine_service import EngineService
from twinplane.control_plane.grpc_server.health import READY, Health
from twinplane.control_plane.grpc_server.interceptor import CallInterceptor
from twinplane.control_plane.grpc_server.service import GenerationService
from twinplane.control_plane.grpc_server.tokenizer_service import TokenizerService
from twinplane.control_plane.text.model import ServedModel
from twinplane.control_plane.types import DrainingError, EngineLike, EngineState
from twinplane.shared.log import get_logger
from twinplane.v1 import engine_pb2_grpc, generation_pb2_grpc, tokenizer_pb2_grpc

log = get_logger(__name__)

CONTRACTS = (READY, "twinplane.v1.TokenizerService", "twinplane.v1.EngineService")
MAX_REQUEST_BYTES = 64 << 20
_FLUSH_S = 1.0  # for the last statuses to reach their clients

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),  # gRPC's default of 4 MiB is less than a long prompt
    ("grpc.max_send_message_length", -1),
    # On by default, and then a second server on the same port gets half of the requests.
    ("grpc.so_reuseport", 0),
    # Gateways ping every 10 to 30 s, also between calls and while a request waits; gRPC's default answers GOAWAY.
    # (The option really is called so; "min_recv_ping_interval_without_data_ms" is silently ignored.)
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Our own pings find peers that vanished without closing the connection.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


class BindError(Exception):
    """The address can not be listened on."""


class GrpcServer:
    """One server on one event loop. ``instance_id`` is shown to clients."""

    def __init__(self, engine: EngineLike, model: ServedModel, *, instance_id: str = "default") -> None:
        self._engine = engine
        self._health = Health()
        self._calls = CallInterceptor()
        self._withdrawn = False
        self._watcher: asyncio.Task[None] | None = None
        self._server = server = grpc.aio.server(interceptors=(self._calls,), options=OPTIONS)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(engine, model), server)  # type: ignore[no-untyped-call]
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(TokenizerService(engine, model), server)  # type: ignore[no-untyped-call]
        administration = EngineService(engine, model, instance_id=instance_id, contracts=CONTRACTS)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(administration, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*CONTRACTS, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    async def start(self, address: str) -> int:
        """Listen on ``host:port`` (port 0: a free one), ``[ipv6]:port`` or ``unix:/path``; returns the port (UNIX: a constant).

        Raises BindError naming the address.
        """
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise BindError(
                f"can not listen on {address}: the address is in use, not of this machine, or not permitted; choose another port"
            ) from error
        await self._server.start()
        self._watcher = asyncio.create_task(self._follow_engine(), name="readiness")
        log.info("listening", address=address, port=port)
        return port

    async def _follow_engine(self) -> None:
        async for state in self._engine.watch_state():
            self._health.set_ready(state is EngineState.READY and not self._withdrawn)

    def withdraw(self) -> None:
        """Report not ready from now on, whatever the engine's state; requests are still served."""
        self._withdrawn = True
        self._health.set_ready(False)

    async def drain(self, grace: float) -> int:
        """Refuse new requests and let live ones finish for ``grace`` seconds. Returns how many did not."""
        self.withdraw()
        return await self._engine.drain(grace)

    async def stop(self, grace: float = 0.0) -> None:
        """Close the listener; calls still open after ``grace`` seconds end with UNAVAILABLE. Idempotent."""
        self.withdraw()
        self._health.close()
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        closing = asyncio.create_task(self._server.stop(grace + _FLUSH_S))  # refuses new connections at once
        await self._calls.finish(grace, DrainingError("the server stopped before the request finished", retry_delay=1.0))
        await closing
