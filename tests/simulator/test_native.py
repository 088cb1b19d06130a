"""The simulator, and with it the scheduler, on random traces under the address and undefined-behaviour sanitizers."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_traces_through_every_system_under_sanitizer() -> None:
    subprocess.run([ROOT / "scripts/native", "control_plane", "-DTWINPLANE_SANITIZE=address"], check=True, capture_output=True)
    program = ROOT / "build/native-control_plane-address/control_plane/simulate_random"
    result = subprocess.run([program, "1", "30"], capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout[-500:] + result.stderr[-8000:]
