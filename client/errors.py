"""Why a call failed, with the server's google.rpc details unpacked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2


class TwinplaneError(Exception):
    """A call failed.

    Attributes:
        code: name of the gRPC status, such as "INVALID_ARGUMENT".
        reason: stable UPPER_SNAKE reason, such as "QUEUE_FULL"; empty if the server was not reached.
        field: dotted request field at fault, if one is.
        retry_delay: seconds after which the server suggests to try again, if it does.
        metadata: numbers behind the refusal, such as {"max_model_len": "2048"}.
        request_id: id under which the server's log knows the request.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        reason: str = "",
        field: str | None = None,
        retry_delay: float | None = None,
        metadata: dict[str, str] | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(f"{code}{f' ({reason})' if reason else ''}: {message}")
        self.message = message
        self.code = code
        self.reason = reason
        self.field = field
        self.retry_delay = retry_delay
        self.metadata = metadata or {}
        self.request_id = request_id

    @property
    def retryable(self) -> bool:
        """The server did no work for the request, or could not be reached.

        RESOURCE_EXHAUSTED without a suggested delay is a message over the size limit: that never gets better.
        """
        return self.code == "UNAVAILABLE" or (self.code == "RESOURCE_EXHAUSTED" and self.retry_delay is not None)


def error_of(error: Any) -> TwinplaneError:
    """From a ``grpc.RpcError`` (both flavours)."""
    trailers = dict(error.trailing_metadata() or ())
    code: grpc.StatusCode = error.code()
    facts = _unpack(trailers.get("grpc-status-details-bin", b""))
    return TwinplaneError(error.details() or code.name, code=code.name, request_id=str(trailers.get("x-request-id", "")), **facts)


def _unpack(details: str | bytes) -> dict[str, Any]:
    status = status_pb2.Status()
    try:
        status.ParseFromString(details if isinstance(details, bytes) else details.encode())
    except DecodeError:  # of somebody in between: the code and message stand without them
        return {}
    return dict(_facts(status))


def _facts(status: status_pb2.Status) -> Iterable[tuple[str, Any]]:
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            yield "reason", info.reason
            yield "metadata", dict(info.metadata)
        elif detail.Unpack(bad) and bad.field_violations:
            yield "field", bad.field_violations[0].field
        elif detail.Unpack(retry):
            yield "retry_delay", retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
