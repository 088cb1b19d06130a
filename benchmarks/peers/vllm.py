"""vLLM's CPU build, over its OpenAI endpoint ``/v1/completions`` with token ids in and out."""

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

_START_TIMEOUT_S = 600.0  # it imports much, and compiles
_KV_CACHE_GIB = 4
_MODEL_NAME = "model"


@dataclass(frozen=True)
class Vllm(Engine):
    variant: str
    precision: str
    options: tuple[str, ...] = ()
    family: str = "vllm"

    def prepare(self, setting: Setting) -> str:
        version = setting.version("vllm", "vllm-cpu")
        weights("huggingface", setting.directory)
        return version

    @contextlib.contextmanager
    def serve(self, workload: str, setting: Setting, log: Path) -> Iterator[Connection]:
        port = free_port()
        # The wheel's own `vllm` command does not start.
        command = [str(setting.python("vllm")), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(weights("huggingface", setting.directory)), "--served-model-name", _MODEL_NAME]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096", *self.options]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # It keeps a core for its front end unless told not to, which on two cores would leave it one.
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        }
        openmp = setting.environment("vllm") / "lib" / "libiomp5.so"
        if openmp.exists():  # comes with the wheel; vLLM advises to load it for speed
            environment["LD_PRELOAD"] = str(openmp)
        ready = f"http://127.0.0.1:{port}/health"
        with running(command, log=log, ready=lambda: sse.answers(ready), environment=environment, timeout=_START_TIMEOUT_S):
            yield separately(generate, port)


async def generate(port: int, request: Request) -> Outcome:
    """One request, timed, over the OpenAI protocol with vLLM's extensions (``ignore_eos``, ``return_token_ids``)."""
    sampling: dict[str, object] = {"temperature": 0.0}
    if request.samples > 1:
        sampling = {"temperature": 1.0, "top_k": TOP_K, "n": request.samples}
    body = {
        "model": _MODEL_NAME,
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **sampling,
    }
    recorder = Recorder()
    try:
        async with contextlib.aclosing(sse.stream(port, "/v1/completions", body)) as events:
            async for event in events:
                if "error" in event:
                    return recorder.end(str(event["error"]))
                _record(event, recorder)
    except (OSError, sse.HttpError) as error:
        return recorder.end(f"{type(error).__name__}: {error}")
    return recorder.end()


def _record(event: dict[str, object], recorder: Recorder) -> None:
    """One chunk: new token ids of one or more samples, or at the end the usage."""
    choices = event.get("choices") or []
    assert isinstance(choices, list)
    tokens = [token for choice in choices for token in choice.get("token_ids") or []]
    recorder.message(len(tokens), tokens)
    usage = event.get("usage")
    if isinstance(usage, dict):
        recorder.outcome.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


ENGINES = (
    Vllm("fp32", "fp32", ("--dtype", "float32")),
    Vllm("fp32-chunk256", "fp32", ("--dtype", "float32", "--max-num-batched-tokens", "256")),
    Vllm("bf16", "16-bit", ("--dtype", "bfloat16")),
)
