"""The lifeline: a UNIX ``SEQPACKET`` socket that carries a session's handshake, and whose end is the peer's death.

The kernel closes a process's sockets however it dies, in whatever PID namespace, so an EOF here is the fastest and surest
news of a death (about a millisecond after ``kill -9``). Steps never go this way. PROTOCOL.md, sections 2 and 6.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType

from . import messages, wire
from .messages import Drain, Hello, Message, Progress, Refuse, Welcome, decode, encode

HELLO_TIMEOUT_S = 5.0  # from connect to `hello`
WELCOME_TIMEOUT_S = 60.0  # from `hello` to the answer; the control plane may be ending the last session
MAX_BACKOFF_S = 0.25  # between attempts to connect while nobody listens

_BACKLOG = 8
_MAX_UNREAD = 256  # messages; beyond it progress is dropped, which only people miss
_UCRED = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED


class LifelineError(Exception):
    """The lifeline can not be used: the peer is gone, silent, foreign, or speaks something else."""


class RefusedError(LifelineError):
    """The control plane said no. ``reason`` is stable UPPER_SNAKE (see :mod:`twinplane.shared.messages`)."""

    def __init__(self, refuse: Refuse) -> None:
        super().__init__(f"the control plane refused this data plane: {refuse.message}")
        self.reason = refuse.reason
        self.message = refuse.message


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Pid and uid of the peer. The pid is as seen from our PID namespace: 0 if the peer is not visible from it."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def _seqpacket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _receive(sock: socket.socket) -> bytes:
    """One packet; empty at EOF, which a reset is as well: the peer died with packets of ours unread."""
    try:
        packet, _, flags, _ = sock.recvmsg(messages.MAX_PACKET_BYTES)
    except ConnectionError:
        return b""
    if flags & socket.MSG_TRUNC:
        raise messages.MessageError(f"a packet over the limit of {messages.MAX_PACKET_BYTES} bytes")
    return packet


class DataPlaneLink:
    """The control plane's view of one attached data plane, from its `hello` to its EOF."""

    def __init__(self, sock: socket.socket, peer_pid: int) -> None:
        self.hello: Hello
        self.peer_pid = peer_pid  # in our PID namespace; 0 if the data plane lives in another
        self.closed = asyncio.Event()  # set at EOF, at close(), and when the peer talks nonsense
        self._sock = sock
        self._unread: asyncio.Queue[Message | None] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(sock, self._on_readable)

    def send(self, message: Message) -> None:
        """Send without waiting. A peer that does not read, or is gone, loses the message and will be seen as dead or stalled."""
        if not self.closed.is_set():
            with contextlib.suppress(OSError):
                self._sock.send(encode(message))

    def refuse(self, reason: str, message: str) -> None:
        """Say no, and close."""
        self.send(Refuse(reason=reason, message=message))
        self.close()

    async def receive(self) -> Message | None:
        """The next message; None once the data plane is gone and every message it sent has been received."""
        message = await self._unread.get()
        if message is None:
            self._unread.put_nowait(None)  # for the next caller
        return message

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the data plane is gone. It may be gone already while some are left: see `closed`."""
        while (message := await self.receive()) is not None:
            yield message

    def close(self) -> None:
        """End the session from our side; the data plane sees EOF. Idempotent."""
        if self.closed.is_set():
            return
        self.closed.set()
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        self._unread.put_nowait(None)

    def is_hung_up(self) -> bool:
        """Whether the peer has closed its end, even if we have not read so far yet."""
        if self.closed.is_set():
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def drain_input(self) -> None:
        """Read what has arrived, up to EOF if it has."""
        self._on_readable()

    def _on_readable(self) -> None:
        while not self.closed.is_set():
            try:
                packet = _receive(self._sock)
                message = decode(packet) if packet else None
            except BlockingIOError:
                return
            except messages.MessageError as error:
                self.refuse(messages.BAD_HELLO, f"a packet that is no message: {error}")
                return
            if not packet:
                self.close()
            elif message is not None and not (isinstance(message, Progress) and self._unread.qsize() >= _MAX_UNREAD):
                self._unread.put_nowait(message)


class LifelineServer:
    """The control plane's listening end: one data plane at a time.

    ``async for link in server`` yields each data plane that connected and introduced itself properly; what does not fit
    is refused here (other protocol, other layout, another user, a second one while the first lives). Works on any
    event loop with ``add_reader``, uvloop included.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sock: socket.socket | None = None
        self._current: DataPlaneLink | None = None
        self._links: asyncio.Queue[DataPlaneLink | None] = asyncio.Queue()
        self._greetings: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Listen. Only the holder of the instance's lock may call this: a socket file in the way is a dead owner's."""
        self._path.unlink(missing_ok=True)
        sock = _seqpacket()
        sock.setblocking(False)
        # The socket exists with its final mode before anybody can connect: bind() applies fchmod'ed mode & ~umask.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(str(self._path))
        self._path.chmod(0o600)
        sock.listen(_BACKLOG)
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock, self._on_connect)

    async def __aiter__(self) -> AsyncIterator[DataPlaneLink]:
        """Each data plane in turn, until :meth:`close`."""
        while (link := await self._links.get()) is not None:
            yield link

    def close(self) -> None:
        """Stop listening, remove the socket, end the current session. Idempotent."""
        if self._sock is None:
            return
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        self._sock = None
        self._path.unlink(missing_ok=True)
        for task in self._greetings:
            task.cancel()
        if self._current is not None:
            self._current.close()
        self._links.put_nowait(None)

    def _on_connect(self) -> None:
        assert self._sock is not None
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionError):
            return
        sock.setblocking(False)
        pid, uid = _peer(sock)
        if uid != os.getuid():  # the socket's mode keeps others out already, but root passes it
            sock.close()
            return
        task = asyncio.ensure_future(self._greet(DataPlaneLink(sock, pid)))
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    async def _greet(self, link: DataPlaneLink) -> None:
        """Wait for `hello`; pass the link on, or refuse it."""
        try:
            hello = await asyncio.wait_for(link.receive(), HELLO_TIMEOUT_S)
        except TimeoutError:
            link.refuse(messages.BAD_HELLO, f"no hello within {HELLO_TIMEOUT_S:g} s")
            return
        except asyncio.CancelledError:
            link.close()
            raise
        if hello is None:
            return
        refusal = _objection(hello) or self._occupied()
        if refusal is not None:
            link.refuse(refusal.reason, refusal.message)
            return
        assert isinstance(hello, Hello)
        link.hello = hello
        self._current = link
        self._links.put_nowait(link)

    def _occupied(self) -> Refuse | None:
        current = self._current
        if current is None:
            return None
        if current.is_hung_up():
            # The first one died, and its successor was quicker than our reading of the EOF. Keep the order: end the old
            # session before the new one begins.
            current.drain_input()
            current.close()
            return None
        pid = current.peer_pid or current.hello.pid
        message = f"a data plane with pid {pid} is attached already; one instance has one: stop it, or use another --instance"
        return Refuse(reason=messages.SECOND_DATA_PLANE, message=message) if not current.closed.is_set() else None


def _objection(message: Message) -> Refuse | None:
    """Why ``message`` is no `hello` we can talk to."""
    if not isinstance(message, Hello):
        return Refuse(reason=messages.BAD_HELLO, message=f"expected a hello first, got {message.type}")
    if message.protocol != messages.PROTOCOL_VERSION:
        text = f"it speaks protocol {message.protocol}, the control plane {messages.PROTOCOL_VERSION}: install the same version for both"
        return Refuse(reason=messages.PROTOCOL_MISMATCH, message=text)
    ours = f"{wire.LAYOUT_HASH:x}"
    if message.layout_hash != ours:
        text = f"its memory layout is {message.layout_hash}, the control plane's {ours}: install the same version for both"
        return Refuse(reason=messages.LAYOUT_MISMATCH, message=text)
    return None


class LifelineClient:
    """The data plane's end: blocking, with a small thread that watches for EOF and `drain`.

    ::

        with LifelineClient.connect(names.socket) as lifeline:
            welcome = lifeline.handshake(hello)
            end = DataEnd(open_segment(welcome.segment), welcome.epoch)
            lifeline.watch(end.wake)
            ...
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.peer_pid, _ = _peer(sock)
        self.lost = threading.Event()  # the control plane is gone (EOF)
        self.draining = threading.Event()  # the control plane asked us to finish and exit
        self._closing = False
        self._watcher: threading.Thread | None = None

    @classmethod
    def connect(
        cls,
        path: Path,
        *,
        stop: threading.Event | None = None,
        timeout: float | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> LifelineClient:
        """Connect; while nobody listens, try again with a bounded back-off.

        Args:
            stop: set by another thread or a signal handler to give up.
            timeout: seconds after which to give up; None = never.
            on_wait: called once when the first attempt found nobody, to tell people what we wait for.

        Raises:
            LifelineError: gave up, or the socket belongs to another user.
        """
        stop = stop or threading.Event()
        deadline = time.monotonic() + timeout if timeout is not None else float("inf")
        delay = 0.01
        while True:
            sock = _seqpacket()
            try:
                sock.connect(str(path))
                return cls._checked(sock, path)
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                sock.close()
            except PermissionError as error:
                sock.close()
                raise LifelineError(f"{path} is not ours to connect to: {error.strerror}; run both planes as one user") from error
            if on_wait is not None:
                on_wait()
                on_wait = None
            if time.monotonic() + delay > deadline:
                raise LifelineError(f"no control plane listens on {path} (waited {timeout:g} s)")
            if stop.wait(delay):
                raise LifelineError(f"stopped while waiting for a control plane on {path}")
            delay = min(delay * 2, MAX_BACKOFF_S)

    @classmethod
    def _checked(cls, sock: socket.socket, path: Path) -> LifelineClient:
        uid = _peer(sock)[1]
        if uid != os.getuid():
            sock.close()
            raise LifelineError(f"the listener on {path} runs as uid {uid}, we as {os.getuid()}: run both planes as one user")
        return cls(sock)

    def handshake(self, hello: Hello, timeout: float = WELCOME_TIMEOUT_S) -> Welcome:
        """Introduce ourselves and return the session offered.

        Raises:
            RefusedError: the control plane said no, and why.
            LifelineError: it is gone, or silent for ``timeout`` seconds.
        """
        self.send(hello)
        self._sock.settimeout(timeout)
        try:
            while packet := _receive(self._sock):
                message = decode(packet)
                if isinstance(message, Welcome):
                    return message
                if isinstance(message, Refuse):
                    raise RefusedError(message)
                if isinstance(message, Drain):
                    self.draining.set()
        except TimeoutError:
            raise LifelineError(f"the control plane has not answered our hello within {timeout:g} s") from None
        except messages.MessageError as error:
            raise LifelineError(f"the control plane sent {error}") from error
        finally:
            self._sock.settimeout(None)
        self.lost.set()
        raise LifelineError("the control plane closed the connection before it answered our hello")

    def watch(self, on_change: Callable[[], None]) -> None:
        """Start watching; ``on_change`` is called in the watcher's thread when `lost` or `draining` becomes set."""
        self._watcher = threading.Thread(target=self._watch, args=(on_change,), name="lifeline", daemon=True)
        self._watcher.start()

    def send(self, message: Message) -> None:
        """Send; from any thread. Does nothing once the control plane is gone: the EOF tells."""
        with contextlib.suppress(ConnectionError):
            self._sock.send(encode(message))

    def close(self) -> None:
        """Hang up. The watcher ends without calling back. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends the watcher's recv; close() alone would not
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        self._sock.close()

    def __enter__(self) -> LifelineClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _watch(self, on_change: Callable[[], None]) -> None:
        while True:
            try:
                packet = _receive(self._sock)
                drain = bool(packet) and isinstance(decode(packet), Drain)
            except messages.MessageError:
                continue  # nothing here decides anything by content it does not know
            except OSError:
                packet, drain = b"", False
            if self._closing:
                return
            if drain:
                self.draining.set()
                on_change()
            if not packet:
                self.lost.set()
                on_change()
                return
