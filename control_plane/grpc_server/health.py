"""grpc.health.v1: alive and ready are two questions.

``""`` and ``"liveness"`` answer SERVING as long as the process does. ``"twinplane.v1.GenerationService"`` is readiness:
SERVING only while a request sent now would be served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ALIVE = ("", "liveness")
READY = "twinplane.v1.GenerationService"
_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The library's own servicer can not end its Watch streams, which would hold up every stop for the full grace."""

    def __init__(self) -> None:
        self._ready = False
        self._closed = False
        self._changed = asyncio.Event()  # replaced at every change, so that any number may wait

    def set_ready(self, ready: bool) -> None:
        if ready != self._ready and not self._closed:
            self._ready = ready
            self._notify()

    def close(self) -> None:
        """Not ready any more; open Watch streams hear that and end."""
        self._ready, self._closed = False, True
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _status(self, service: str) -> int:
        if service in ALIVE:
            return int(_Status.SERVING)
        if service == READY:
            return int(_Status.SERVING if self._ready else _Status.NOT_SERVING)
        return int(_Status.SERVICE_UNKNOWN)

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        status = self._status(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            known = ", ".join(map(repr, (*ALIVE, READY)))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no health of {request.service[:100]!r} here; known: {known}")
        return _Status(status=status)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        """The status now and at every change. A watcher that is slow sees the latest, not every one."""
        last = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                last = status
                yield _Status(status=status)
            elif self._closed:
                return
            else:
                await changed.wait()
