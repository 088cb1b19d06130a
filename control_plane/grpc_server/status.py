"""Errors of the engine as gRPC statuses with google.rpc details (https://google.aip.dev/193)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from twinplane.control_plane.types import EngineError

DOMAIN = "twinplane.dev"
REQUEST_ID = "x-request-id"
_DETAILS = "grpc-status-details-bin"
_RETRYABLE = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
_DEFAULT_RETRY_DELAY_S = 1.0
# Statuses travel in HTTP/2 trailers, for which peers allow 8 KiB in all; the message goes there twice.
_MAX_MESSAGE = 1000


@dataclass(frozen=True)
class Status(grpc.Status):
    """What ``context.abort_with_status`` takes."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def status_of(error: EngineError, request_id: str) -> Status:
    """``error`` as a status; its trailers hold the google.rpc details and the request id."""
    message = error.message if len(error.message) <= _MAX_MESSAGE else error.message[: _MAX_MESSAGE - 1] + "…"
    rich = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=message, details=map(_packed, _details(error, message)))
    trailers = ((_DETAILS, rich.SerializeToString()), (REQUEST_ID, request_id))
    return Status(grpc.StatusCode[error.code], message, trailers)


def _details(error: EngineError, message: str) -> Iterable[Message]:
    metadata = {key: value[:200] for key, value in error.metadata.items()}
    yield error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    if error.code == "INVALID_ARGUMENT" and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message, reason=error.reason)
        yield error_details_pb2.BadRequest(field_violations=[violation])
    if error.code == "RESOURCE_EXHAUSTED":
        quota = error_details_pb2.QuotaFailure.Violation(subject="queue", description=message)
        yield error_details_pb2.QuotaFailure(violations=[quota])
    if error.code in _RETRYABLE:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(1e9 * (_DEFAULT_RETRY_DELAY_S if error.retry_delay is None else error.retry_delay)))
        yield error_details_pb2.RetryInfo(retry_delay=delay)


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
