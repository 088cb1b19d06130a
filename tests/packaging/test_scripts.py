"""scripts/setup.sh, the part of the scripts that decides: what is missing, and whether anything has to be done."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ["scripts/demo", "scripts/test", "scripts/native", "scripts/proto", "scripts/setup.sh", ".ci/run"]


def bash(code: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    script = f"set -euo pipefail; . scripts/setup.sh; {code}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment}, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A small stand-in for a clone: what the fingerprint is made of, and an installed .venv."""
    for name in ("scripts/setup.sh", "pyproject.toml", "CMakeLists.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("shared", "control_plane", "kernels"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.cpp").write_text("int x;")
    program = tmp_path / ".venv" / "bin" / "twinplane"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path


def mark_installed(clone: Path, *extras: str) -> None:
    assert bash(f'echo "$(fingerprint) {" ".join(extras)}" > $venv/.twinplane', clone).returncode == 0


def is_current(clone: Path, *extras: str, **environment: str) -> bool:
    return bash(f"is_current {' '.join(extras)}", clone, **environment).returncode == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_valid_bash_and_executable(script):
    assert subprocess.run(["bash", "-n", ROOT / script], check=False).returncode == 0
    assert script.endswith(".sh") or os.access(ROOT / script, os.X_OK)


def test_a_missing_compiler_is_named_with_the_package_that_has_it():
    done = bash("check_system", CXX="no-such-compiler")
    assert done.returncode == 1
    assert "a C++20 compiler (package g++" in done.stderr and "apt-get install" in done.stderr


def test_a_missing_python_is_named_with_the_version_needed():
    done = bash("check_system", TWINPLANE_PYTHON="no-such-python")
    assert done.returncode == 1
    assert "Python 3.11 or later" in done.stderr


def test_nothing_is_done_when_nothing_changed(clone):
    mark_installed(clone, "data-plane", "test", "dev")
    assert is_current(clone, "data-plane", "test")
    (clone / "shared" / "new.py").write_text("pass")  # an editable install sees it anyway
    assert is_current(clone, "data-plane", "test")


def test_new_native_sources_requirements_and_extras_are_noticed(clone):
    mark_installed(clone, "data-plane", "test")
    assert not is_current(clone, "dev")
    assert not is_current(clone, "test", TWINPLANE_TORCH="torch==2.12.0")
    (clone / "kernels" / "module.cpp").write_text("int y;")
    assert not is_current(clone, "test")


def test_an_empty_clone_is_not_current(tmp_path, clone):
    shutil.rmtree(clone / ".venv")
    assert not is_current(clone, "test")
