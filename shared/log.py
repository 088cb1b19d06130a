"""Logging of both planes: structlog on stderr, JSON lines off a terminal, readable lines on one.

An event is a constant ``snake_case`` name with fields beside it, never a formatted sentence, so that it can be counted::

    log = get_logger(__name__)
    log.info("request_finished", tokens=31, ttft_ms=12.5)

Keys: ``timestamp`` (ISO 8601, UTC), ``level``, ``event``, ``logger``, then what :func:`bound` put into the context
(``request_id``, ``trace_id``, ...), then the event's own fields. Records of libraries that use :mod:`logging`
come out in the same form. Prompts and answers are never logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Hashable, MutableMapping
from typing import Any, TextIO

import structlog

__all__ = ["Limiter", "bound", "configure", "get_logger", "last_error"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_KEY_ORDER = ("timestamp", "level", "event", "logger")

# Fields for everything logged inside a `with` block or task: `with bound(request_id=...):`.
bound = structlog.contextvars.bound_contextvars

_last_error: str | None = None


def last_error() -> str | None:
    """The latest record at level error or above as one line, for the supervisor's last sentence."""
    return _last_error


def get_logger(name: str) -> Any:
    """A structlog logger that says ``logger=name``; the package prefix is left out."""
    return structlog.get_logger(name.removeprefix("twinplane."))


def configure(level: str = "info", format: str = "auto", stream: TextIO | None = None) -> None:
    """Set up logging for this process. ``format``: auto, json or console; ``level``: debug, info, warning or error.

    Libraries are heard from their warnings up, and fully at level debug.
    """
    out = stream or sys.stderr
    console = format == "console" or (format == "auto" and out.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _add_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _remember_error,
            *(_console(out) if console else _json()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda name="": _Output(name, out),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [_Bridge()]
    root.setLevel(_LEVELS[level] if level == "debug" else max(_LEVELS[level], logging.WARNING))
    logging.captureWarnings(True)


def _console(out: TextIO) -> list[Any]:
    return [structlog.dev.ConsoleRenderer(colors=out.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback)]


def _json() -> list[Any]:
    return [structlog.processors.format_exc_info, structlog.processors.UnicodeDecoder(), _render_json]


def _render_json(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    ordered = {key: event.pop(key) for key in _KEY_ORDER if key in event} | dict(event)
    return json.dumps(ordered, default=repr, ensure_ascii=False)


def _add_name(logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    event["logger"] = logger.name
    return event


def _remember_error(_logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    global _last_error
    if event["level"] in ("error", "critical"):
        cause = event.get("error") or event.get("message")
        failure = event.get("exc_info")
        exception = failure if isinstance(failure, BaseException) else sys.exc_info()[1] if failure else None
        if cause is None and exception is not None:
            cause = f"{type(exception).__name__}: {exception}"
        name = "" if event["event"] == "failed" and cause else f"{event['event']}: "
        _last_error = " ".join(f"{name}{cause}".split()) if cause else str(event["event"])
    return event


class _Output:
    """Where the lines of one named logger go.

    The reader of the stream may go away (a closed terminal, a full disk) without taking the plane down.
    """

    __slots__ = ("_stream", "name")

    def __init__(self, name: str, stream: TextIO) -> None:
        self.name = name
        self._stream = stream

    def msg(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            self._stream.write(line + "\n")  # one write: lines of several threads do not mix
            self._stream.flush()

    debug = info = warning = error = critical = msg


class _Bridge(logging.Handler):
    """Hands records of the standard library's logging to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            get_logger(record.name).log(record.levelno, record.getMessage(), exc_info=record.exc_info)
        except Exception:
            self.handleError(record)


class Limiter:
    """At most one record per ``interval_s`` and key; the next one says how many were left out.

    Thread-safe. ``limiter.log(log.warning, "stalled", key=peer, phase=phase)``.
    """

    def __init__(self, interval_s: float = 1.0, max_keys: int = 1024) -> None:
        self._interval_s = interval_s
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._seen: dict[Hashable, tuple[float, int]] = {}  # key -> (time of the last record, left out since)

    def admit(self, key: Hashable) -> int | None:
        """None if this one is to be left out, else the number left out since the last admitted one."""
        now = time.monotonic()
        with self._lock:
            last, left_out = self._seen.get(key, (float("-inf"), 0))
            if now - last < self._interval_s:
                self._seen[key] = (last, left_out + 1)
                return None
            if len(self._seen) >= self._max_keys and key not in self._seen:
                self._seen.pop(next(iter(self._seen)))  # oldest key: memory stays bounded whatever callers use as key
            self._seen[key] = (now, 0)
            return left_out

    def log(self, method: Any, event: str, *, key: Hashable = None, **fields: Any) -> None:
        left_out = self.admit((event, key))
        if left_out is not None:
            method(event, **fields, **({"left_out": left_out} if left_out else {}))
