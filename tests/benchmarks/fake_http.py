"""An HTTP server on a loopback port that answers every POST with bytes given beforehand, cut as given."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence


def chunked(pieces: Sequence[bytes]) -> list[bytes]:
    """``pieces`` in chunked transfer coding, one chunk each."""
    return [f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces] + [b"0\r\n\r\n"]


def events(*objects: object) -> list[bytes]:
    """Each as the data of a server-sent event."""
    return [f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n".encode() for one in objects]


class FakeServer:
    """What it was asked, and how many of its clients went away before the end."""

    def __init__(self, pieces: Sequence[bytes], *, head: str, pause_s: float, hold: bool) -> None:
        self.requests: list[dict[str, object]] = []
        self.paths: list[str] = []
        self.left_early = 0
        self.port = 0
        self._pieces, self._head, self._pause_s, self._hold = pieces, head, pause_s, hold

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        self.paths.append(head.split()[1])
        self.requests.append(json.loads(await reader.readexactly(int(headers["Content-Length"]))))
        assert headers["Connection"] == "close"
        with contextlib.suppress(ConnectionError):
            writer.write(self._head.encode())
            for piece in self._pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(self._pause_s)
            if self._hold and await reader.read() == b"":
                self.left_early += 1
        writer.close()


@contextlib.asynccontextmanager
async def serving(
    pieces: Sequence[bytes],
    *,
    head: str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    pause_s: float = 0.0,
    hold: bool = False,
) -> AsyncIterator[FakeServer]:
    """Run one. With ``hold`` it keeps the connection open after the last piece until the client closes it."""
    fake = FakeServer(pieces, head=head, pause_s=pause_s, hold=hold)
    server = await asyncio.start_server(fake.answer, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    async with server:
        yield fake
