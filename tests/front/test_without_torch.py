"""The control plane runs where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

IMPORT_ALL = """
import pkgutil, sys
sys.modules["torch"] = None  # importing it now fails as if it were not there
import twinplane.control_plane, twinplane.client
names = [m.name for p in (twinplane.control_plane, twinplane.client) for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".")]
for name in names:
    if name not in sys.argv[1:]:
        __import__(name)
assert "transformers" not in sys.modules, "imported for nothing: it takes seconds"
print(len(names))
"""

LOAD_FOLDER = """
import sys
sys.modules["torch"] = None
from twinplane.control_plane.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
print("ids", tokenizer.encode("the fox"))
"""

CLIENT_ONLY = """
import sys
import twinplane.client
# grpc itself imports its siblings where they are installed.
allowed = {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "cython_runtime", "google", "twinplane", "typing_extensions"}
foreign = {m.split(".")[0] for m in sys.modules} - set(sys.stdlib_module_names) - allowed - set(sys.argv[1:])
print(sorted(name for name in foreign if not name.startswith("_")))
assert not any(name.startswith("twinplane.control_plane") for name in sys.modules)
"""


def run(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_imports_without_torch() -> None:
    assert int(run(IMPORT_ALL)) > 20


def test_a_hugging_face_folder_loads_without_torch(tmp_path: Path) -> None:
    from front_support import tiny_metadata
    from twinplane.control_plane.text.gguf_tokenizer import build_tokenizer

    build_tokenizer(tiny_metadata()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    ids = build_tokenizer(tiny_metadata()).encode("the fox").ids
    assert run(LOAD_FOLDER, str(tmp_path)).endswith(f"ids {ids}")


def test_the_client_imports_nothing_but_grpc_and_protobuf() -> None:
    before = run("import sys; print(*{m.split('.')[0] for m in sys.modules})").split()
    assert run(CLIENT_ONLY, *before) == "[]"


def test_a_tokenizer_leaves_no_thread_behind_when_closed() -> None:
    program = """
import asyncio, threading
import sys; sys.path.append(sys.argv[1])
from front_support import tiny_tokenizer
tokenizer = tiny_tokenizer()
async def main(): await tokenizer.run(10**6, lambda: None)
asyncio.run(main())
tokenizer.close()
for thread in threading.enumerate():
    if thread.name.startswith("tokenizer"): thread.join(10)
print([t.name for t in threading.enumerate() if t.name.startswith("tokenizer")])
"""
    assert run(program, str(Path(__file__).parent)) == "[]"
