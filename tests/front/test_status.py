"""Errors on the wire: code, google.rpc details, and a size that fits into trailers."""

from __future__ import annotations

import grpc
import pytest
from twinplane.client.errors import TwinplaneError, error_of
from twinplane.control_plane import types
from twinplane.control_plane.grpc_server.status import status_of

ERRORS = [kind for kind in vars(types).values() if isinstance(kind, type) and issubclass(kind, types.EngineError)]


def over_the_wire(error: types.EngineError) -> tuple[TwinplaneError, int]:
    """What a client makes of it, and the bytes of its trailers."""
    status = status_of(error, "request-7")
    received = grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), details=status.details)
    return error_of(received), sum(len(key) + len(value) for key, value in status.trailing_metadata) + len(status.details.encode())


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_arrives_with_code_reason_field_delay_and_numbers(kind: type[types.EngineError]) -> None:
    error, _ = over_the_wire(kind("what happened", field="a.b", retry_delay=1.5, metadata={"limit": "7"}))
    assert (error.code, error.reason, error.message, error.request_id) == (kind.code, kind.reason, "what happened", "request-7")
    assert error.metadata == {"limit": "7"}
    assert error.field == ("a.b" if kind.code == "INVALID_ARGUMENT" else None)
    assert error.retry_delay == (1.5 if kind.code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE") else None)


def test_retryable_statuses_always_say_when() -> None:
    for kind in (types.QueueFullError, types.UnavailableError, types.DrainingError):
        error, _ = over_the_wire(kind("later"))
        assert error.retry_delay == 1.0
        assert error.retryable


def test_huge_messages_are_cut_to_fit_into_trailers() -> None:
    error, size = over_the_wire(types.InvalidRequestError("é" * 100_000, field="x", metadata={"name": "y" * 100_000}))
    assert size < 8192
    assert error.message.endswith("…")
