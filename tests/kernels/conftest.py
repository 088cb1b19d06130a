"""Makes the helper modules of this folder importable: in importlib mode pytest adds no test folder to the path.

Only this folder: with its parent on the path, a bare ``kernels`` would be importable, which transformers reacts to.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

INSTRUCTION_SETS = ("amx", "avx512_bf16", "avx512", "avx2", "plain")


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of the native CPU kernels that this processor has, forced."""
    cpu = pytest.importorskip("twinplane.kernels._cpu")
    if request.param not in cpu.supported_isas():
        pytest.skip(f"this processor has no {request.param}")
    before = cpu.isa()
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(before)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """The test may change the size of the kernels' pool."""
    cpu = pytest.importorskip("twinplane.kernels._cpu")
    before = cpu.threads()
    yield
    cpu.set_threads(before)
