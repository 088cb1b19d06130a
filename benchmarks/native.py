"""The native benchmark programs, which are installed beside the core they link."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from twinplane.control_plane import _core


def program(name: str) -> Path:
    """Where the program is. Raises FileNotFoundError if this build has none."""
    path = Path(_core.__file__).with_name(name)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: this installation was built without the benchmark programs")
    return path


def measure(name: str, *arguments: int) -> dict[str, Any]:
    """What the program prints, one JSON object. Raises subprocess.CalledProcessError if it fails."""
    result = subprocess.run([program(name), *map(str, arguments)], check=True, capture_output=True, text=True)
    measured: dict[str, Any] = json.loads(result.stdout)
    return measured
