"""The control plane's end of a session, blocking and in a few lines, over the real lock, socket and segment."""

from __future__ import annotations

import os
import socket
from types import TracebackType

from planner import CAPACITIES, Result, StepBuilder
from twinplane.shared import messages
from twinplane.shared._shm import ControlEnd
from twinplane.shared.segment import InstanceLock, create_segment

PATIENCE_S = 60.0  # a liveness bound only


class ControlStub:
    """Owns the instance and serves one data plane at a time. Leaving the context without `drain` is a sudden death."""

    def __init__(self, instance: str, epoch: int = 1) -> None:
        self._lock = InstanceLock(instance)
        self._instance, self._epoch = instance, epoch
        self._end: ControlEnd | None = None
        self._connection: socket.socket | None = None

    def __enter__(self) -> ControlStub:
        self._lock.acquire()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self._lock.names.socket))
        self._listener.listen(1)
        self._listener.settimeout(PATIENCE_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()
        if self._end is not None:
            self._end.close()
        self._lock.release()

    def accept(self) -> messages.Hello:
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(PATIENCE_S)
        hello = self.receive()
        assert isinstance(hello, messages.Hello)
        return hello

    def receive(self) -> messages.Message | None:
        assert self._connection is not None
        packet = self._connection.recv(messages.MAX_PACKET_BYTES)
        return messages.decode(packet) if packet else None

    def send(self, message: messages.Message) -> None:
        assert self._connection is not None
        self._connection.send(messages.encode(message))

    def welcome(self) -> None:
        segment = create_segment(self._instance, CAPACITIES, self._epoch)
        self._end = ControlEnd(segment.fd, self._epoch)
        self.send(
            messages.Welcome(
                epoch=self._epoch,
                segment=segment.name,
                segment_bytes=segment.bytes,
                capacities=tuple(CAPACITIES),
                max_step_tokens=CAPACITIES.max_step_tokens,
                max_chunk_tokens=256,
            )
        )
        os.close(segment.fd)

    def until_ready(self) -> list[messages.Message]:
        """Messages up to and including `ready` (or `fatal`)."""
        seen: list[messages.Message] = []
        while not seen or not isinstance(seen[-1], messages.Ready | messages.Fatal):
            message = self.receive()
            assert message is not None, "the data plane hung up"
            seen.append(message)
        return seen

    def step(self, step: StepBuilder) -> Result:
        assert self._end is not None
        slot = self._end.step_slot(10**9)
        assert slot is not None
        data = step.build()
        slot[: len(data)] = data
        self._end.publish()
        sequence = self._end.wait_result(int(PATIENCE_S * 1e9))
        assert sequence is not None, "no result"
        result = Result.parse(self._end.result(sequence).copy())
        self._end.consume(sequence)
        return result

    @property
    def peer(self) -> dict[str, int]:
        assert self._end is not None
        return self._end.peer()
