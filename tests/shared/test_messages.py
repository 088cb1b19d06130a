"""Messages of the lifeline: what is tolerated, what is not."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twinplane.shared import messages
from twinplane.shared.messages import Drain, Fatal, Hello, Message, MessageError, Progress, Ready, Refuse, Welcome, decode, encode

HELLO = Hello(
    layout_hash="ab", pid=1, start_time=2, device="cpu", model="/m", fingerprint="f", block_size=16, num_blocks=8, num_host_blocks=0,
    kv_dtype="float32", dtype="float32", kv_bytes_per_block=64, max_model_len=128, vocab_size=100, num_layers=2, loaded=False,
)  # fmt: skip
EVERY: list[Message] = [
    HELLO,
    Welcome(epoch=1, segment="/s", segment_bytes=4096, capacities=(1, 2, 3), max_step_tokens=4, max_chunk_tokens=5),
    Refuse(reason="R", message="no"),
    Progress(phase="weights", done=1.5, total=3.0, unit="GB"),
    Ready(phases={"load": 1.0}, summary="ok"),
    Fatal(error="broken", detail="trace"),
    Drain(),
]


@pytest.mark.parametrize("message", EVERY, ids=lambda m: m.type)
def test_every_message_survives_the_journey(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", EVERY, ids=lambda m: m.type)
def test_unknown_keys_of_a_newer_peer_are_ignored(message: Message) -> None:
    packet = json.dumps({**json.loads(encode(message)), "invented_later": [1, 2]}).encode()
    assert decode(packet) == message


def test_unknown_types_are_nothing() -> None:
    assert decode(b'{"type": "invented_later"}') is None


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Hello) if f.name != "protocol"])
def test_a_missing_key_is_named(name: str) -> None:
    content = json.loads(encode(HELLO))
    del content[name]
    with pytest.raises(MessageError, match=f"hello without '{name}'"):
        decode(json.dumps(content).encode())


@pytest.mark.parametrize(
    ("type_name", "key", "value"),
    [
        ("hello", "pid", "1"),
        ("hello", "pid", True),
        ("hello", "pid", 1.5),
        ("hello", "loaded", 1),
        ("hello", "model", None),
        ("welcome", "capacities", [1, "2"]),
        ("welcome", "capacities", 3),
        ("progress", "done", "half"),
        ("ready", "phases", {"load": "long"}),
    ],
)
def test_a_value_of_the_wrong_type_is_named(type_name: str, key: str, value: object) -> None:
    message = next(m for m in EVERY if m.type == type_name)
    packet = json.dumps({**json.loads(encode(message)), key: value}).encode()
    with pytest.raises(MessageError, match=rf"{type_name}\.{key}"):
        decode(packet)


@pytest.mark.parametrize("packet", [b"", b"\xff\xfe", b"{", b"[]", b"3", b'{"type": 3}', b"{}", b"[" * 60000])
def test_what_is_no_message_is_an_error(packet: bytes) -> None:
    with pytest.raises(MessageError):
        decode(packet)


@given(st.binary(max_size=200))
def test_no_packet_does_worse_than_an_error(packet: bytes) -> None:
    with contextlib.suppress(MessageError):
        decode(packet)


@given(st.text(max_size=300).map(lambda text: text * 500), st.text(max_size=50).map(lambda text: text * 1000))
def test_a_fatal_always_fits_and_keeps_the_end_of_its_traceback(detail: str, error: str) -> None:
    packet = encode(Fatal(error=error, detail=detail))
    assert len(packet) <= messages.MAX_PACKET_BYTES
    sent = decode(packet)
    assert isinstance(sent, Fatal) and detail.endswith(sent.detail) and error.startswith(sent.error)


def test_another_message_too_large_is_refused_with_both_numbers() -> None:
    with pytest.raises(MessageError, match=r"progress of 7\d+ bytes is over the limit of 65536"):
        encode(Progress(phase="x" * 70_000, done=0, total=1))
