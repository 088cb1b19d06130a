"""What an engine is to the comparison, and which there are."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ..load import Generate, Outcome, Request


class Missing(Exception):
    """The engine can not be run here; the message says how to install it."""


@dataclass(frozen=True)
class Setting:
    """What all engines of a comparison share."""

    directory: Path  # of environments and converted weights
    threads: int

    def environment(self, engine: str) -> Path:
        """The virtual environment that ``python -m twinplane.benchmarks.peers.install ENGINE`` makes."""
        return self.directory / engine

    def python(self, engine: str) -> Path:
        """The Python of that environment. Raises Missing."""
        python = self.environment(engine) / "bin" / "python"
        if not python.exists():
            raise Missing(f"not installed: python -m twinplane.benchmarks.peers.install {engine} --directory {self.directory}")
        return python

    def ask(self, engine: str, code: str) -> str:
        """What ``code`` prints in that environment. Raises Missing if it fails."""
        done = subprocess.run([self.python(engine), "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Missing(f"its environment is broken: {done.stderr.strip().splitlines()[-1]}")
        return done.stdout.strip()

    def version(self, engine: str, distribution: str) -> str:
        """Of a package in that environment. Raises Missing."""
        return self.ask(engine, f"import importlib.metadata as m; print(m.version({distribution!r}))")


def default_directory() -> Path:
    return Path.home() / ".cache" / "twinplane" / "peers"


def usable_threads() -> int:
    return len(os.sched_getaffinity(0))


Connection = AbstractAsyncContextManager[Generate]


@contextlib.asynccontextmanager
async def separately(generate: Callable[[int, Request], Awaitable[Outcome]], port: int) -> AsyncIterator[Generate]:
    """The connection to a server that gets a connection of its own for each request."""
    yield functools.partial(generate, port)


class Engine(ABC):
    """One engine with one format of the weights, for instance ``llama.cpp q8_0``."""

    family: str  # "llama.cpp"
    variant: str  # "q8_0"
    precision: str  # "fp32", "16-bit", "8-bit" or "4-bit": engines of one precision are compared with each other

    @property
    def name(self) -> str:
        """As the command line has it."""
        return f"{self.family}-{self.variant}"

    @abstractmethod
    def prepare(self, setting: Setting) -> str:
        """Make what a start needs (converted weights), and return the engine's version. Raises Missing."""

    @abstractmethod
    def serve(self, workload: str, setting: Setting, log: Path) -> AbstractContextManager[Connection]:
        """Run a server, ready when entered, ended when left. The connection is opened within the event loop that uses it."""


def registry() -> dict[str, Engine]:
    """All engines by name."""
    from . import llama_cpp, openvino, twinplane, vllm

    return {engine.name: engine for module in (twinplane, llama_cpp, openvino, vllm) for engine in module.ENGINES}


def choose(names: Sequence[str]) -> list[Engine]:
    """The engines named, each by its own name or all of a family by the family's. Raises ValueError."""
    engines = registry()
    chosen: dict[str, Engine] = {}
    for name in names:
        found = {key: engine for key, engine in engines.items() if name in (key, engine.family)}
        if not found:
            families = dict.fromkeys(engine.family for engine in engines.values())
            raise ValueError(f"there is no engine {name!r}; there are {', '.join([*families, *engines])}")
        chosen |= found
    return list(chosen.values())
