"""OpenVINO GenAI: a library, so its continuous batching runs in a small server of ours, ``openvino_worker.py``.

Weights are compressed by NNCF from the float32 values. What the CPU plugin chooses by itself stays (bfloat16 arithmetic where the processor
has it, an eight-bit KV cache), except for ``fp32``, which is told to compute in float32.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..load import TOP_K, Outcome, Recorder, Request
from ..server import free_port
from .engines import Connection, Engine, Missing, Setting, separately
from .processes import running
from .weights import weights

_HERE = Path(__file__).parent
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class OpenVino(Engine):
    variant: str
    precision: str
    compression: str  # as openvino_convert.py names it
    properties: Mapping[str, str] = field(default_factory=dict, hash=False)
    family: str = "openvino"

    def prepare(self, setting: Setting) -> str:
        version = setting.version("openvino", "openvino-genai")
        self._model(setting)
        return version

    @contextlib.contextmanager
    def serve(self, workload: str, setting: Setting, log: Path) -> Iterator[Connection]:
        port = free_port()
        command = [
            *_script(setting, "openvino_worker.py"),
            str(self._model(setting)),
            str(port),
            str(setting.threads),
            json.dumps(dict(self.properties)),
        ]
        with running(command, log=log, ready=lambda: _listens(port)):
            yield separately(generate, port)

    def _model(self, setting: Setting) -> Path:
        """The converted model, made if it is not there yet (a minute). Raises Missing with what the conversion said."""
        source = weights("huggingface", setting.directory)
        path = source.with_name(f"{source.name}-openvino-{self.compression}")
        if path.exists():
            return path
        unfinished = path.with_name(f"{path.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [*_script(setting, "openvino_convert.py"), str(source), str(unfinished), self.compression]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Missing(f"the model could not be converted: {done.stderr.strip().splitlines()[-1]}")
        return unfinished.rename(path)


def _script(setting: Setting, name: str) -> list[str]:
    """A script of this folder, in the engine's environment. ``-P`` keeps the folder off the import path: it has an ``openvino`` too."""
    return [str(setting.python("openvino")), "-P", str(_HERE / name)]


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


async def generate(port: int, request: Request) -> Outcome:
    """One request, timed; in the protocol that ``openvino_worker.py`` describes."""
    recorder = Recorder()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_MAX_LINE_BYTES)
    question = {"prompt": request.prompt, "max_tokens": request.max_tokens, "samples": request.samples, "top_k": TOP_K}
    try:
        writer.write(json.dumps(question).encode() + b"\n")
        await writer.drain()
        while True:
            line = await reader.readline()
            if not line:
                return recorder.end("the server closed the connection in the middle of its answer")
            answer = json.loads(line)
            if "done" in answer:
                return recorder.end()
            recorder.message(len(answer["tokens"]), answer["tokens"])
    except OSError as error:
        return recorder.end(f"{type(error).__name__}: {error}")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


ENGINES = (
    OpenVino("fp32", "fp32", "fp32", {"INFERENCE_PRECISION_HINT": "f32"}),
    OpenVino("bf16", "16-bit", "fp32"),
    OpenVino("int8", "8-bit", "int8"),
    OpenVino("int4", "4-bit", "int4"),
)
