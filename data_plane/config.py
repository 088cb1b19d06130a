"""Settings of the data plane as its code uses them; the command line fills them (twinplane.shared.config)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataPlaneConfig:
    """None (or "auto") means: chosen by the data plane, and printed with the reason.

    ``max_num_seqs`` and ``max_num_batched_tokens`` size the workspace in the memory plan; the control plane's
    `welcome` has the last word on both.
    """

    model: str
    instance: str = "default"
    device: str = "auto"
    dtype: str = "auto"  # float32, bfloat16, float16
    quantization: str = "none"  # or a key of models.base.QUANTIZATIONS
    cpu_activations: str = "float"  # or int8
    threads: int | None = None
    kernels: str | None = None  # force one implementation of kernels.registry, for tests and comparisons
    kv_cache_dtype: str = "auto"
    kv_cache_bytes: int | None = None
    swap_space: int = 0  # bytes of host memory that KV blocks may be swapped to
    memory_fraction: float | None = None  # share of the machine's (or the cgroup's) memory for this process as a whole
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256


class DataPlaneError(Exception):
    """Something a person must change; the message is one sentence that says what."""
