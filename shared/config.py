"""Every setting of Twinplane, declared once.

The command line, its ``--help``, the environment variables, the YAML keys and the checks all derive from the fields
below; :mod:`twinplane.shared.options` reads them. No other module reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from twinplane.shared.options import Choice, ConfigError, Integer, Loaded, Number, Seconds, Size, Text, load, option

__all__ = ["CommonSettings", "ConfigError", "ControlPlaneSettings", "DataPlaneSettings", "Loaded", "ServeSettings", "read"]

# sockaddr_un.sun_path holds 108 bytes with the terminating zero.
_MAX_UNIX_PATH = 107
_MAX_TENANT_WEIGHT = 1000  # kMaxTenantWeight of the core
_MAX_OVERTAKEN = 8  # unless the operator says otherwise


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """What both planes must know."""

    model: str = option("", Text("MODEL"), "model", "folder in Hugging Face format, .gguf file, or name on the Hugging Face hub")
    max_model_len: int | None = option(
        None,
        Integer(minimum=2),
        "model",
        "longest sequence, prompt and answer together, in tokens",
        auto="what the model was trained for, or what the KV cache can hold if that is less",
    )
    max_num_seqs: int = option(64, Integer(1, 65536), "scheduler", "sequences in flight at once")
    max_num_batched_tokens: int = option(
        256,
        Integer(1, 1 << 20),
        "scheduler",
        "tokens one step may carry over all its sequences; prompts pause running streams for a step at most",
    )
    instance: str = option(
        "default",
        Text(
            "NAME",
            r"(?!.*\.(lock|sock)$)[A-Za-z0-9][A-Za-z0-9_.-]{0,63}",
            "1 to 64 letters, digits, '_', '.' or '-', not ending in .lock or .sock",
        ),
        "instance",
        "name that pairs a control plane with its data plane; several instances can run on one machine",
    )
    log_level: str = option("info", Choice(("debug", "info", "warning", "error")), "logging", "least severe level that is logged")
    log_format: str = option("auto", Choice(("auto", "json", "console")), "logging", "auto: console on a terminal, JSON lines elsewhere")

    def problems(self) -> list[str]:
        """Faults that only show between fields or against the machine, one sentence each."""
        found = []
        looks_like_path = self.model.startswith(("/", "./", "../", "~")) or self.model.endswith(".gguf")
        if looks_like_path and not Path(self.model).expanduser().exists():
            found.append(f"model: {self.model} does not exist")
        if self.max_num_seqs > self.max_num_batched_tokens:
            found.append(
                f"max-num-seqs is {self.max_num_seqs} but max-num-batched-tokens only {self.max_num_batched_tokens}: "
                "every running sequence needs one token of each step, so raise the latter or lower the former"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class ControlPlaneSettings(CommonSettings):
    """Settings of ``twinplane control-plane``."""

    tokenizer: str | None = option(None, Text("PATH"), "model", "tokenizer folder, file or hub name", auto="the model's own")
    chat_template: str | None = option(None, Text("FILE"), "model", "Jinja file used for chat", auto="the model's own")
    served_model_name: str | None = option(None, Text("NAME"), "model", "name clients give for the model", auto="the last part of MODEL")
    seed: int | None = option(
        None,
        Integer(minimum=0, maximum=2**64 - 1),
        "model",
        "base of the seeds given to requests that bring none",
        auto="random",
    )

    host: str = option("127.0.0.1", Text("ADDRESS"), "network", "address to listen on; there is no authentication, so mind what you expose")
    port: int = option(50051, Integer(0, 65535, "PORT"), "network", "gRPC port; 0 takes a free one")
    uds: str | None = option(None, Text("PATH"), "network", "listen on this UNIX socket instead of host and port", auto="TCP")

    max_chunk_tokens: int = option(256, Integer(1, 1 << 20), "scheduler", "prompt tokens one sequence may get in one step")
    itl_target_ms: float = option(
        0.0,
        Number(0, 60_000, "MS"),
        "scheduler",
        "inter-token latency that 99 % of the tokens are to stay within: prompts get what is left of each step; 0 = no target",
    )
    overlap_depth: int = option(2, Integer(1, 3), "scheduler", "steps in flight; 1 plans a step only after the last one returned")
    max_substeps: int = option(
        1,
        Integer(1, 64),
        "scheduler",
        "tokens a sequence may get from one step while nothing but decodes runs and nobody waits; an arrival ends such a step early",
    )
    policy: str = option(
        "priority",
        Choice(("fcfs", "priority", "fair")),
        "scheduler",
        "who comes in next: first come first served; the higher priority; or the tenant (x-twinplane-tenant) that was served least",
    )
    tenant_weights: str | None = option(
        None,
        Text("NAME=N,...", r"[!-+\--<>-~]{1,64}=\d+(,[!-+\--<>-~]{1,64}=\d+)*", "NAME=N,NAME=N,... with names of at most 64 characters"),
        "scheduler",
        "with --policy fair: shares of tenants, from 1 to 1000",
        auto="everyone has 1",
    )
    max_overtaken: int | None = option(
        None,
        Integer(0, 1000),
        "scheduler",
        "so many times may a waiting request be overtaken by an equal one (same priority; with fair, same tenant) of which the prefix "
        "cache has more; 0 = strictly first come",
        auto="8; with fcfs 0",
    )
    max_waiting_requests: int = option(1024, Integer(0), "scheduler", "requests queued beyond those in flight; more are refused")
    max_waiting_tokens: int = option(1 << 20, Integer(0), "scheduler", "prompt tokens queued; more are refused")

    data_plane_timeout: float = option(30.0, Seconds(0.1), "instance", "a live data plane that does not answer for so long is replaced")
    drain_delay: float = option(0.0, Seconds(), "stopping", "after SIGTERM, report not ready for so long before refusing requests")
    drain_grace: float = option(30.0, Seconds(), "stopping", "then let running requests finish for so long")

    def problems(self) -> list[str]:
        found = super().problems()
        if self.uds is not None and len(os.fsencode(self.uds)) > _MAX_UNIX_PATH:
            found.append(
                f"uds: the path has {len(os.fsencode(self.uds))} bytes, a UNIX socket allows {_MAX_UNIX_PATH}: choose a shorter one"
            )
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            found.append(f"chat-template: {self.chat_template} is not a file")
        if self.tenant_weights is not None and self.policy != "fair":
            found.append(f"tenant-weights are given but policy is {self.policy}: they matter with policy fair only")
        for tenant, weight in self.weights():
            if not 1 <= weight <= _MAX_TENANT_WEIGHT:
                found.append(f"tenant-weights: the weight of {tenant} is {weight}, it must be from 1 to {_MAX_TENANT_WEIGHT}")
        return found

    def most_overtaken(self) -> int:
        """``max_overtaken`` as it is meant where it is not given."""
        if self.max_overtaken is not None:
            return self.max_overtaken
        return 0 if self.policy == "fcfs" else _MAX_OVERTAKEN

    def weights(self) -> list[tuple[str, int]]:
        """``tenant_weights`` by name."""
        pairs = (entry.split("=") for entry in (self.tenant_weights or "").split(",") if entry)
        return [(name, int(weight)) for name, weight in pairs]


@dataclass(frozen=True, kw_only=True)
class DataPlaneSettings(CommonSettings):
    """Settings of ``twinplane data-plane``."""

    device: str = option("auto", Choice(("auto", "cpu", "cuda")), "device", "auto: CUDA if there is one")
    dtype: str = option("auto", Choice(("auto", "float32", "bfloat16", "float16")), "device", "number format the model computes in")
    quantization: str = option(
        "none", Choice(("none", "q8", "q4")), "device", "round the weights of a safetensors model to 8 or 4 bits while loading"
    )
    cpu_activations: str = option(
        "float",
        Choice(("float", "int8")),
        "device",
        "int8: round what meets weights of 4 to 8 bits to 8 bits too, for about twice the speed on a CPU; float: exact",
    )
    threads: int | None = option(None, Integer(1, 1024), "device", "CPU threads", auto="the cores this process may use")

    kernels: str | None = option(
        None, Text("NAME"), "device", "force one implementation of the kernels (`reference`, for comparisons)", auto="the fastest"
    )

    kv_cache_dtype: str = option(
        "auto",
        Choice(("auto", "float32", "bfloat16", "float16", "fp8_e4m3")),
        "KV cache",
        "number format of the KV cache; auto on a CPU: bfloat16 with int8 activations, else float32",
    )
    kv_cache_bytes: int | None = option(None, Size(), "KV cache", "size of the KV cache", auto="set by memory-fraction")
    memory_fraction: float | None = option(
        None,
        Number(0.01, 0.99),
        "KV cache",
        "share of the device's memory for weights, workspace and KV cache",
        auto="the device's default",
    )
    swap_space: int = option(
        0,
        Size(minimum=0),
        "KV cache",
        "host memory that KV blocks of preempted requests are swapped to instead of being recomputed; "
        "on the CPU the KV cache is host memory already, so a larger one usually serves better than swap space",
    )
    block_size: int | None = option(
        None, Integer(1, 256), "KV cache", "tokens per KV block", auto="by head dimension, number format and device"
    )

    def problems(self) -> list[str]:
        found = super().problems()
        if self.kv_cache_bytes is not None and self.memory_fraction is not None:
            found.append("kv-cache-bytes and memory-fraction both size the KV cache: give one of them")
        if self.block_size is not None and self.block_size not in (16, 32, 64):
            found.append(f"block-size is {self.block_size}: it must be 16, 32 or 64")
        return found


@dataclass(frozen=True, kw_only=True)
class ServeSettings(ControlPlaneSettings, DataPlaneSettings):
    """Settings of ``twinplane serve``: both planes and their supervisor."""

    max_restarts: int = option(5, Integer(0, 1000), "instance", "restarts of a plane within five minutes before giving up")


ALL_NAMES = frozenset(field.name for field in fields(ServeSettings))
S = TypeVar("S", bound=CommonSettings)


def read(settings: type[S], cli: Mapping[str, object], *, config: Path | None = None, model_required: bool = True) -> Loaded[S]:
    """Settings of one command from its command line, the process environment, the YAML file and the defaults.

    ``cli`` holds only what was given. Raises ConfigError with one sentence per problem.
    """
    required = ("model",) if model_required else ()
    return load(settings, cli=cli, environ=os.environ, file=config, known=ALL_NAMES, required=required)
