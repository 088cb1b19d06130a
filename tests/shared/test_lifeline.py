"""The lifeline: handshake, refusals, and the news of a death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from twinplane.shared import lifeline, messages, wire
from twinplane.shared.lifeline import DataPlaneLink, LifelineClient, LifelineError, LifelineServer, RefusedError
from twinplane.shared.liveness import process_start_time
from twinplane.shared.messages import Drain, Fatal, Hello, Progress, Ready, Refuse, Welcome, encode
from twinplane.shared.segment import instance_names

WELCOME = Welcome(epoch=3, segment="/s", segment_bytes=4096, capacities=(1, 2), max_step_tokens=4, max_chunk_tokens=5)


@pytest.fixture
def path(instance: str) -> Path:
    return instance_names(instance).socket


@pytest.fixture
async def server(path: Path) -> AsyncIterator[LifelineServer]:
    server = LifelineServer(path)
    server.start()
    yield server
    server.close()


def hello() -> Hello:
    return Hello(
        layout_hash=f"{wire.LAYOUT_HASH:x}", pid=os.getpid(), start_time=process_start_time(os.getpid()), device="cpu", model="/m",
        fingerprint="f", block_size=16, num_blocks=8, num_host_blocks=0, kv_dtype="float32",
        dtype="float32", kv_bytes_per_block=64, max_model_len=128, vocab_size=100, num_layers=2, loaded=False,
    )  # fmt: skip


async def next_link(server: LifelineServer) -> DataPlaneLink:
    return await asyncio.wait_for(anext(aiter(server)), 20)


async def in_thread(call: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(call, *args), 30)


async def attach(server: LifelineServer, path: Path) -> tuple[DataPlaneLink, LifelineClient]:
    """A data plane in this process, welcomed."""
    client = await in_thread(LifelineClient.connect, path)
    shaking = asyncio.ensure_future(in_thread(client.handshake, hello()))
    link = await next_link(server)
    link.send(WELCOME)
    assert await shaking == WELCOME
    return link, client


# ------------------------------------------------------------------------------------------------ handshake


async def test_a_session_from_hello_to_the_end(server: LifelineServer, path: Path) -> None:
    link, client = await attach(server, path)
    assert link.hello == hello() and link.peer_pid == os.getpid() == client.peer_pid
    changed = threading.Event()
    client.watch(changed.set)
    said: list[messages.Message] = [Progress(phase="weights", done=1, total=2), Ready(summary="ok"), Fatal(error="broken")]
    for message in said:
        client.send(message)
    link.send(Drain())
    assert await in_thread(changed.wait, 20)
    assert client.draining.is_set() and not client.lost.is_set()
    await in_thread(client.close)
    assert [message async for message in link] == said  # nothing is lost to the EOF behind it
    assert link.closed.is_set()


async def test_C17_socket_is_for_the_owner_alone_and_gone_after_close(path: Path) -> None:
    before = os.umask(0)
    server = LifelineServer(path)
    server.start()
    os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.close()
    server.close()
    assert not path.exists()
    assert [link async for link in server] == []


async def test_a_dead_owners_socket_file_is_not_in_the_way(path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(str(path))
    dead.close()
    server = LifelineServer(path)
    server.start()
    _, client = await attach(server, path)
    client.close()
    server.close()


async def test_a_data_plane_waits_until_somebody_listens(path: Path) -> None:
    waited = threading.Event()
    connecting = asyncio.ensure_future(in_thread(lambda: LifelineClient.connect(path, on_wait=waited.set)))
    assert await in_thread(waited.wait, 20)
    server = LifelineServer(path)
    server.start()
    (await connecting).close()
    server.close()


def test_waiting_for_a_control_plane_can_be_given_up(path: Path) -> None:
    with pytest.raises(LifelineError, match=r"no control plane listens on .* \(waited 0.05 s\)"):
        LifelineClient.connect(path, timeout=0.05)
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(LifelineError, match="stopped while waiting"):
        LifelineClient.connect(path, stop=stop)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "reason", "names"),
    [
        ({"protocol": 2}, messages.PROTOCOL_MISMATCH, "protocol 2, the control plane 1"),
        ({"layout_hash": "beef"}, messages.LAYOUT_MISMATCH, f"layout is beef, the control plane's {wire.LAYOUT_HASH:x}"),
    ],
)
async def test_another_build_is_refused_naming_both(
    server: LifelineServer, path: Path, change: dict[str, Any], reason: str, names: str
) -> None:
    client = await in_thread(LifelineClient.connect, path)
    with pytest.raises(RefusedError, match=names) as refused:
        await in_thread(client.handshake, replace(hello(), **change))
    assert refused.value.reason == reason
    client.close()


async def test_a_second_data_plane_is_refused_naming_the_first(server: LifelineServer, path: Path) -> None:
    link, first = await attach(server, path)
    second = await in_thread(LifelineClient.connect, path)
    with pytest.raises(RefusedError, match=f"data plane with pid {os.getpid()} is attached already") as refused:
        await in_thread(second.handshake, hello())
    assert refused.value.reason == messages.SECOND_DATA_PLANE
    second.close()
    first.send(Ready())
    assert await asyncio.wait_for(link.receive(), 20) == Ready()  # the first is undisturbed
    first.close()


async def test_a_successor_that_is_quicker_than_the_eof_of_the_dead_is_accepted(server: LifelineServer, path: Path) -> None:
    link, first = await attach(server, path)
    first.send(Fatal(error="broken"))
    # Both at once, before the loop runs: it may see the new connection before the old one's end.
    first.close()
    second = LifelineClient.connect(path)
    shaking = asyncio.ensure_future(in_thread(second.handshake, hello()))
    new = await next_link(server)
    assert link.closed.is_set() and [message async for message in link] == [Fatal(error="broken")]
    new.send(WELCOME)
    assert await shaking == WELCOME
    second.close()


async def test_a_session_the_consumer_refuses_ends_with_its_reason(server: LifelineServer, path: Path) -> None:
    client = await in_thread(LifelineClient.connect, path)
    shaking = asyncio.ensure_future(in_thread(client.handshake, hello()))
    (await next_link(server)).refuse("NO_MEMORY", "/dev/shm is too small")
    with pytest.raises(RefusedError, match="/dev/shm is too small"):
        await shaking
    client.close()


@pytest.mark.parametrize("packet", [b"nonsense", b'{"type": "hello"}', encode(Ready()), b"x" * (messages.MAX_PACKET_BYTES + 1)])
async def test_nonsense_instead_of_a_hello_is_refused_and_the_next_one_served(server: LifelineServer, path: Path, packet: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(path))
        stranger.send(packet)
        answer = messages.decode(await in_thread(stranger.recv, 65536))
        assert isinstance(answer, Refuse) and answer.reason == messages.BAD_HELLO
        assert await in_thread(stranger.recv, 1) == b""
    _, client = await attach(server, path)
    client.close()


async def test_somebody_who_says_nothing_is_refused_in_time_and_blocks_nobody(
    server: LifelineServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline, "HELLO_TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(path))
        _, client = await attach(server, path)
        answer = messages.decode(await in_thread(silent.recv, 65536))
        assert isinstance(answer, Refuse) and "no hello within 0.1 s" in answer.message
        client.close()


async def test_another_user_is_turned_away_by_both_sides(server: LifelineServer, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials come from the kernel; here we pretend to be another user than the one it tells of."""
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(LifelineError, match=f"runs as uid {uid}, we as {uid + 1}"):
        await in_thread(LifelineClient.connect, path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(path))
        with contextlib.suppress(OSError):
            stranger.send(encode(hello()))
        assert await in_thread(lifeline._receive, stranger) == b""


async def test_a_control_plane_that_dies_during_the_handshake_is_an_error(server: LifelineServer, path: Path) -> None:
    client = await in_thread(LifelineClient.connect, path)
    shaking = asyncio.ensure_future(in_thread(client.handshake, hello()))
    (await next_link(server)).close()
    with pytest.raises(LifelineError, match="closed the connection"):
        await shaking
    assert client.lost.is_set()
    client.close()


async def test_a_control_plane_that_does_not_answer_is_an_error(server: LifelineServer, path: Path) -> None:
    client = await in_thread(LifelineClient.connect, path)
    with pytest.raises(LifelineError, match=r"not answered our hello within 0.05 s"):
        await in_thread(client.handshake, hello(), 0.05)
    client.close()


async def test_progress_that_nobody_reads_is_dropped_before_memory_grows_and_the_rest_is_kept(server: LifelineServer, path: Path) -> None:
    link, client = await attach(server, path)

    def flood() -> None:
        for done in range(2000):
            client.send(Progress(phase="weights", done=done, total=2000))
        client.send(Ready())
        client.close()

    await in_thread(flood)
    await asyncio.wait_for(link.closed.wait(), 20)
    received = [message async for message in link]
    assert received[-1] == Ready() and len(received) <= lifeline._MAX_UNREAD + 1


# ---------------------------------------------------------------------------------------------------- death

DATA_PLANE = """
import sys, time
from pathlib import Path
from twinplane.shared.lifeline import LifelineClient
from twinplane.shared.messages import decode
client = LifelineClient.connect(Path(sys.argv[1]))
client.handshake(decode(sys.argv[2].encode()))
client.watch(lambda: print("lost" if client.lost.is_set() else "draining", flush=True))
print("attached", flush=True)
time.sleep(100)
"""

CONTROL_PLANE = """
import asyncio, sys
from pathlib import Path
from twinplane.shared.lifeline import LifelineServer
from twinplane.shared.messages import decode
async def main():
    server = LifelineServer(Path(sys.argv[1]))
    server.start()
    print("listening", flush=True)
    async for link in server:
        link.send(decode(sys.argv[2].encode()))
        async for message in link:
            pass
asyncio.run(main())
"""


@contextlib.contextmanager
def process(code: str, path: Path, message: Any) -> Any:
    started = subprocess.Popen([sys.executable, "-c", code, str(path), encode(message).decode()], stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


async def test_C05_death_of_the_data_plane_is_seen_by_eof_within_100_ms(server: LifelineServer, path: Path) -> None:
    delays = []
    for _ in range(3):
        with process(DATA_PLANE, path, hello()) as data:
            link = await next_link(server)
            assert link.peer_pid == data.pid
            link.send(WELCOME)
            assert await in_thread(data.stdout.readline) == "attached\n"
            start = time.monotonic()
            os.kill(data.pid, signal.SIGKILL)
            assert await asyncio.wait_for(link.receive(), 20) is None
            delays.append(time.monotonic() - start)
    assert min(delays) < 0.1, delays


async def test_C06_death_of_the_control_plane_is_seen_and_the_data_plane_attaches_to_the_next(path: Path) -> None:
    with process(CONTROL_PLANE, path, WELCOME) as control:
        assert await in_thread(control.stdout.readline) == "listening\n"
        client = await in_thread(LifelineClient.connect, path)
        assert await in_thread(client.handshake, hello()) == WELCOME
        lost = threading.Event()
        client.watch(lost.set)
        os.kill(control.pid, signal.SIGKILL)
        assert await in_thread(lost.wait, 20) and client.lost.is_set()
        client.send(Ready())  # into the void: no error
        client.close()
    server = LifelineServer(path)
    reconnecting = asyncio.ensure_future(in_thread(LifelineClient.connect, path))
    await asyncio.sleep(0.05)
    server.start()
    (await reconnecting).close()
    server.close()


async def test_closing_the_client_does_not_look_like_a_death_to_itself(server: LifelineServer, path: Path) -> None:
    _, client = await attach(server, path)
    called = threading.Event()
    client.watch(called.set)
    await in_thread(client.close)
    client.close()
    assert not called.is_set() and not client.lost.is_set()


async def test_closing_the_server_ends_the_session(server: LifelineServer, path: Path) -> None:
    link, client = await attach(server, path)
    lost = threading.Event()
    client.watch(lost.set)
    server.close()
    assert await in_thread(lost.wait, 20)
    assert link.closed.is_set() and await link.receive() is None
    client.close()
