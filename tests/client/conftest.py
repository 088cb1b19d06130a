"""A real server on a loopback port, on a loop of its own thread, so that both clients can be tested against it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

# In importlib mode pytest adds no test folder to the path; the fake engine lives with the front's tests.
sys.path.append(str(Path(__file__).parent.parent / "front"))

from fake_engine import FakeEngine
from front_support import serving


class Served:
    """``target`` to connect to; ``engine`` to look at (mind that it lives on another thread)."""

    def __init__(self) -> None:
        self.target = ""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        self.engine = FakeEngine(lambda request: [index % 200 + 10 for index in range(40)], step_s=0.001)
        async with serving(self.engine) as (self.target, _):
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as running:
        yield running
