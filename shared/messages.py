"""Messages of the lifeline (PROTOCOL.md, section 2): one JSON object per packet, with a ``type``.

Decoding is tolerant of newer peers: unknown types and unknown keys are ignored. Missing keys and wrong types are not.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

PROTOCOL_VERSION = 1
MAX_PACKET_BYTES = 64 * 1024

# Reasons of a `refuse`.
PROTOCOL_MISMATCH = "PROTOCOL_MISMATCH"
LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
SECOND_DATA_PLANE = "SECOND_DATA_PLANE"
BAD_HELLO = "BAD_HELLO"


class MessageError(ValueError):
    """A packet that is no message, or a message too large to send."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Data plane: who I am and what I can hold."""

    type: ClassVar[str] = "hello"
    protocol: int = PROTOCOL_VERSION
    layout_hash: str  # hex, wire.LAYOUT_HASH
    pid: int  # in the sender's PID namespace
    start_time: int
    device: str
    model: str  # path as given
    fingerprint: str  # of weights and config
    block_size: int  # tokens
    num_blocks: int
    num_host_blocks: int  # of the swap pool; 0 = none
    kv_dtype: str
    dtype: str
    kv_bytes_per_block: int
    max_model_len: int  # tokens
    vocab_size: int
    num_layers: int
    loaded: bool  # weights are in memory already: `ready` follows `welcome` at once


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Control plane: here is your session."""

    type: ClassVar[str] = "welcome"
    epoch: int
    segment: str
    segment_bytes: int
    capacities: tuple[int, ...]  # in schema order
    max_step_tokens: int
    max_chunk_tokens: int


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """Control plane: no; the socket is closed after it."""

    type: ClassVar[str] = "refuse"
    reason: str  # stable, UPPER_SNAKE
    message: str


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Data plane: how far a long phase has come."""

    type: ClassVar[str] = "progress"
    phase: str
    done: float
    total: float
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Data plane: steps may come."""

    type: ClassVar[str] = "ready"
    phases: dict[str, float] = field(default_factory=dict)  # name: seconds
    summary: str = ""
    swap_block_ns: int = 0  # measured: one block to the host's pool and back; 0 = there is no such pool


@dataclass(frozen=True, kw_only=True)
class Fatal:
    """Data plane: I am about to exit, because."""

    type: ClassVar[str] = "fatal"
    error: str  # one sentence
    detail: str = ""  # traceback


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Control plane: finish and exit 0."""

    type: ClassVar[str] = "drain"


Message: TypeAlias = Hello | Welcome | Refuse | Progress | Ready | Fatal | Drain

_TYPES: dict[str, type[Message]] = {cls.type: cls for cls in (Hello, Welcome, Refuse, Progress, Ready, Fatal, Drain)}


def encode(message: Message) -> bytes:
    """The packet of ``message``. A `fatal` that is too long loses the end of its detail; any other raises MessageError."""
    packet = json.dumps({"type": message.type, **dataclasses.asdict(message)}).encode()
    if len(packet) <= MAX_PACKET_BYTES:
        return packet
    if isinstance(message, Fatal) and (message.detail or len(message.error) > 1000):
        # Halving, because a character may take up to twelve bytes of JSON. A long traceback's end says the most.
        kept = message.detail[len(message.detail) // 2 + 1 :]
        return encode(Fatal(error=message.error[:1000], detail=kept))
    raise MessageError(f"a {message.type} of {len(packet)} bytes is over the limit of {MAX_PACKET_BYTES}")


def decode(packet: bytes) -> Message | None:
    """The message in ``packet``; None for a type this version does not know. Raises MessageError."""
    try:
        content = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("type"), str):
        raise MessageError("not a JSON object with a type")
    cls = _TYPES.get(content["type"])
    return None if cls is None else _build(cls, content)


def _build(cls: type[Message], content: dict[str, Any]) -> Message:
    values: dict[str, Any] = {}
    for member in dataclasses.fields(cls):
        if member.name in content:
            values[member.name] = _checked(cls, member, content[member.name])
        elif member.default is dataclasses.MISSING and member.default_factory is dataclasses.MISSING:
            raise MessageError(f"{cls.type} without {member.name!r}")
    return cls(**values)


def _checked(cls: type[Message], member: dataclasses.Field[Any], value: Any) -> Any:
    """``value`` if it has the member's type (annotations are strings here), as that type."""
    match member.type:
        case "int" if isinstance(value, int) and not isinstance(value, bool):
            return value
        case "float" if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        case "str" if isinstance(value, str):
            return value
        case "bool" if isinstance(value, bool):
            return value
        case "tuple[int, ...]" if isinstance(value, list) and all(isinstance(item, int) for item in value):
            return tuple(value)
        case "dict[str, float]" if isinstance(value, dict) and all(isinstance(item, int | float) for item in value.values()):
            return {str(key): float(item) for key, item in value.items()}
        case _:
            raise MessageError(f"{cls.type}.{member.name} is {value!r}, expected {member.type}")
