from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from twinplane.shared import segment
from twinplane.shared._shm import ControlEnd, DataEnd
from twinplane.shared.wire import Capacities

PEER = Path(__file__).parent / "peer.py"
_serial = itertools.count()


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Each asynchronous test runs on both kinds of loop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class PeerProcess:
    """A plane in a process of its own (see peer.py)."""

    def __init__(self, role: str, instance: str, epoch: int, *options: object) -> None:
        command = [sys.executable, str(PEER), role, instance, str(epoch), *map(str, options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.pid = self.process.pid

    def read(self) -> dict[str, Any]:
        """The next JSON line it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate(timeout=30)
            raise AssertionError(f"peer ended with {self.process.returncode}: {errors}")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def wait_started(self) -> PeerProcess:
        """Python and its modules are loaded, which takes seconds on a busy machine."""
        assert "started" in self.read()
        return self

    def wait_attached(self) -> PeerProcess:
        while "attached" not in self.read():
            pass
        return self

    def wait_exit(self, timeout: float = 30) -> int:
        return self.process.wait(timeout)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture
def instance() -> Iterator[str]:
    """A name of its own for the test; whatever it leaves in /dev/shm is removed."""
    name = f"test-{os.getpid()}-{next(_serial)}"
    yield name
    names = segment.instance_names(name)
    for path in (names.lock, names.socket, names.segment_path):
        path.unlink(missing_ok=True)


@pytest.fixture
def spawn() -> Iterator[Callable[..., PeerProcess]]:
    """Start a peer process; it is gone after the test."""
    started: list[PeerProcess] = []

    def start(*args: object) -> PeerProcess:
        started.append(PeerProcess(*args))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


@pytest.fixture
def capacities() -> Capacities:
    return Capacities(
        ring_depth=4,
        max_rows=8,
        max_step_tokens=64,
        max_table_writes=16,
        max_copies=4,
        max_extra_words=16,
        max_results=16,
        max_swaps=4,
        max_candidates=16,
    )


@pytest.fixture
def ends(instance: str, capacities: Capacities) -> Iterator[tuple[ControlEnd, DataEnd]]:
    """Both ends of one session in this process, mapped twice."""
    made = segment.create_segment(instance, capacities, epoch=1)
    control, data = ControlEnd(made.fd, 1), DataEnd(made.fd, 1)
    made.close()
    yield control, data
    control.close()
    data.close()
