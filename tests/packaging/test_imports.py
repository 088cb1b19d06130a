"""What importing and starting costs, and what our folder names must not do to others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("grpc", "torch", "transformers", "numpy", "structlog", "yaml", "google.protobuf", "asyncio")


def python(code: str, *, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_after(arguments: list[str], *, exit_code: int = 0) -> set[str]:
    """Names in sys.modules after ``twinplane ARGUMENTS`` ended."""
    code = f"""
import json, sys
from twinplane.cli.main import main
try:
    code = main({arguments!r})
except SystemExit as end:
    code = end.code or 0
assert code == {exit_code}, code
sys.stdout.write("\\n" + json.dumps(sorted(sys.modules)))
"""
    return set(json.loads(python(code).splitlines()[-1]))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["serve", "--help"],
        ["control-plane", "--help"],
        ["data-plane", "--help"],
        ["chat", "--help"],
        ["health", "--help"],
        ["simulate", "--help"],
    ],
    ids=" ".join,
)
def test_F07_help_and_version_import_nothing_heavy(arguments):
    assert modules_after(arguments).isdisjoint(HEAVY)


@pytest.mark.parametrize("command", ["serve", "control-plane", "data-plane"])
def test_F07_wrong_settings_are_found_before_anything_heavy_is_imported(command):
    assert modules_after([command, "model", "--max-num-seqs", "0"], exit_code=78).isdisjoint(HEAVY)
    assert modules_after([command, "/no/such/model.gguf"], exit_code=78).isdisjoint(HEAVY)


def test_the_control_plane_needs_no_torch():
    pytest.importorskip("twinplane.control_plane.main")
    code = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
import twinplane.control_plane.main
"""
    python(code)


def test_the_data_plane_needs_no_grpc():
    pytest.importorskip("twinplane.data_plane.main")
    code = """
import sys
for name in ("grpc", "google.protobuf", "tokenizers"):
    sys.modules[name] = None
import twinplane.data_plane.main
"""
    python(code)


def test_transformers_loads_models_from_the_repository_root_in_spite_of_our_kernels_folder():
    # transformers probes for a package called `kernels`; a regular package of that name on the path breaks it.
    code = "import os, sys; sys.path.insert(0, os.getcwd()); from transformers import AutoModelForCausalLM as auto; print(auto.__name__)"
    assert "AutoModelForCausalLM" in python(code)


@pytest.mark.parametrize("name", ["shared", "kernels", "control_plane", "data_plane", "client", "cli"])
def test_no_folder_of_ours_is_importable_by_its_bare_name(name, tmp_path):
    out = python(f"from importlib.util import find_spec; print(find_spec({name!r}))", cwd=tmp_path)
    assert str(ROOT) not in out


def test_kernels_and_proto_stay_namespace_packages():
    for folder in ("kernels", "proto"):
        assert not (ROOT / folder / "__init__.py").exists()
