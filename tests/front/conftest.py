"""Fixtures of the front's tests: a fake engine behind a real gRPC server, and clients of both kinds."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# In importlib mode pytest adds no test folder to the path. Only this folder: with its parent on the path, a bare
# `kernels` would be importable, which transformers reacts to.
sys.path.append(str(Path(__file__).parent))

from fake_engine import FakeEngine
from front_support import demo_model, serving, tiny_tokenizer
from twinplane.client import AsyncClient
from twinplane.control_plane.text.tokenizer import Tokenizer, load_tokenizer

# Machines are shared: how long one example takes says nothing.
settings.register_profile("front", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("front")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    path = demo_model()
    if path is None:
        pytest.skip("the demo model is not installed")
    return load_tokenizer(path)


@pytest.fixture
async def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(lambda request: tokenizer.encode("The quick brown fox"))


@pytest.fixture
async def address(engine: FakeEngine) -> AsyncIterator[str]:
    async with serving(engine) as (target, _):
        yield target


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address) as connected:
        yield connected
