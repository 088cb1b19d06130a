"""The native kernels under the sanitizers (native/kernel_stress.cpp)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("ninja") is None, reason="needs cmake and ninja")
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_native_kernels_are_clean_under_the_sanitizer(sanitizer: str) -> None:
    build = ["scripts/native", "kernels", f"-DTWINPLANE_SANITIZE={sanitizer}"]
    subprocess.run(build, cwd=ROOT, check=True, env=os.environ | {"TWINPLANE_PYTHON": sys.executable.removeprefix(f"{ROOT}/")})
    program = ROOT / "build" / f"native-kernels-{sanitizer}" / "kernels" / "kernel_stress"
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plain: clean" in done.stdout
