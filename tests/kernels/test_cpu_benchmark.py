"""The kernel benchmark runs and says what it promises."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_benchmark_holds_every_kernel_against_a_measured_ceiling() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "kernels.py"
    spec = importlib.util.spec_from_file_location("kernel_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    figures = module.run(repeats=1, cold_bytes=1, warm_bytes=1)
    assert figures["read_gb_per_s"] > 0 and figures["fma_gflops"] > 0 and figures["torch_best_gflops"] > 0
    lines = figures["kernels"]
    kernels = {line["kernel"] for line in lines}
    assert kernels >= {
        "decode step float32",
        "decode step Q8_0 int8",
        "linear float32",
        "linear Q4_1 int8",
        "linear Q8_0 int8 / floats",
        "linear float32 / torch",
        "paged attention fp8_e4m3",
    }
    for line in lines:
        assert set(line) == {"kernel", "shape", "achieved", "ceiling", "unit", "share", "goal"}
        assert line["achieved"] > 0 and line["ceiling"] > 0 and line["unit"] in ("GB/s", "GFLOP/s")
