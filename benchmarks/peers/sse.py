"""POST a JSON object over HTTP/1.1 and read the answer as server-sent events (WHATWG HTML, section 9.2).

A connection per request, never reused: llama-server closes idle ones without a word. Written on plain asyncio streams so that the client
costs little beside the engine, and so that nothing has to be installed for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

_MAX_LINE_BYTES = 1 << 24  # an event may repeat the whole prompt
_DONE = "[DONE]"  # OpenAI's end of a stream, which is no JSON


class HttpError(Exception):
    """The server refused the request, or broke off its answer."""


def answers(url: str) -> bool:
    """Whether a GET of ``url`` is answered with a status below 400 within a second."""
    try:
        with urllib.request.urlopen(url, timeout=1.0) as response:
            return bool(response.status < 400)
    except (OSError, urllib.error.URLError):
        return False


async def stream(port: int, path: str, body: Mapping[str, object]) -> AsyncGenerator[dict[str, object], None]:
    """The events' data, each a JSON object, up to the end of the answer or ``[DONE]``. Raises HttpError or OSError.

    Closing the iterator closes the connection, which tells the server that its client has gone.
    """
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    head += "Accept: text/event-stream\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_MAX_LINE_BYTES)
    try:
        writer.write(head.encode() + content)
        await writer.drain()
        status, headers = await _head(reader)
        chunks = _chunks(reader) if headers.get("transfer-encoding", "").lower() == "chunked" else _rest(reader)
        if status != 200:
            raise HttpError(f"HTTP {status}: {b''.join([chunk async for chunk in chunks]).decode(errors='replace')[:500]}")
        async for data in _events(chunks):
            if data == _DONE:
                return
            yield json.loads(data)
    except asyncio.IncompleteReadError as error:
        raise HttpError("the server closed the connection in the middle of its answer") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.split(":", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, value in headers.items()}


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Chunked transfer coding (RFC 9112, section 7.1)."""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        chunk = await reader.readexactly(size + 2)
        yield chunk[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while chunk := await reader.read(1 << 16):
        yield chunk


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each event; chunks may end anywhere, also within a line or a character."""
    pending, data = b"", []
    async for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            text = line.rstrip(b"\r").decode()
            if text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text and data:
                yield "\n".join(data)
                data = []
    if data:
        yield "\n".join(data)
