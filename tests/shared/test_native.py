"""The native half under the sanitizers (native/ring_stress.cpp), and the ring benchmark."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_C13_native_stress_is_clean_under_the_sanitizer(sanitizer: str) -> None:
    build = ["scripts/native", "shared", f"-DTWINPLANE_SANITIZE={sanitizer}"]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=600)
    program = ROOT / "build" / f"native-shared-{sanitizer}" / "shared" / "ring_stress"
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    result = subprocess.run([program, "20000"], capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0 and result.stdout.startswith("ok:"), result.stderr[-5000:]


def test_ring_benchmark_reports_both_sides_of_its_comparison() -> None:
    spec = importlib.util.spec_from_file_location("ring", ROOT / "benchmarks" / "ring.py")
    assert spec is not None and spec.loader is not None
    ring = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ring)
    report = ring.run(round_trips=400, rounds=2)
    assert report["round_trips"] == 400 and report["payload_bytes"] == 64
    for kind in ("ring", "futex", "python"):
        assert 0 < report[f"{kind}_p50_us"] <= report[f"{kind}_p99_us"]
    assert report["ring_to_futex"] == round(report["ring_p50_us"] / report["futex_p50_us"], 2)
