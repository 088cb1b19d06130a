"""What a built wheel holds: every module and stub, four native modules, the proto files, the simulator's data; and nothing else."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: dict[str, str] = PROJECT["tool"]["scikit-build"]["wheel"]["packages"]
PROGRAMS = {f"twinplane/control_plane/{name}_bench" for name in ("tick", "admit", "prefix")}
NATIVE = {"twinplane/shared/_shm", "twinplane/control_plane/_core", "twinplane/control_plane/_simulator", "twinplane/kernels/_cpu"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # compiles all native modules
SHIPPED = {".py", ".pyi", ".typed", ".proto", ".json", ".csv", ".txt"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources, as a clean clone has them."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in sorted(set(PACKAGES.values())):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, copy]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("twinplane-*.whl")
    return built


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_the_wheel_holds_all_modules_and_nothing_else(wheel):
    expected = {
        f"{package}/{path.relative_to(ROOT / folder)}"
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED and path.name != "CMakeLists.txt" and "__pycache__" not in path.parts
    } | {f"{package}/py.typed" for package, folder in PACKAGES.items() if (ROOT / folder / "py.typed").exists()}
    found = {name for name in names_in(wheel) if ".dist-info/" not in name}
    native = {name for name in found if name.endswith(".so")}
    assert {name.split(".")[0] for name in native} == NATIVE
    assert found - native == expected | PROGRAMS


def test_the_wheel_needs_torch_for_the_data_plane_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(next(n for n in archive.namelist() if n.endswith("dist-info/METADATA"))))
    torch = [requirement for requirement in metadata.get_all("Requires-Dist") if requirement.startswith("torch")]
    assert torch and all("extra == 'data-plane'" in requirement.replace('"', "'") for requirement in torch)


def test_the_installed_wheel_runs_without_the_sources(wheel, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, wheel]
    subprocess.run(command, check=True)
    # -S: without site-packages, so neither the editable install nor any dependency helps.
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from twinplane.cli.main import main; sys.exit(main(['--version']))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    for program in PROGRAMS:
        assert os.access(tmp_path / program, os.X_OK)
    assert done.stdout == f"twinplane {PROJECT['project']['version']}\n", done.stderr
