"""The memory plan: made from config and file sizes, printed, and checked before anything large is allocated.

``memory_fraction`` is this process's share of the machine's *total* memory (or the cgroup's limit): weights, workspace, KV
cache, swap space and the interpreter together. It does not depend on what others use at the moment, so two instances with fractions x and
y fit whenever x + y <= 1 minus the rest of the machine, whichever starts first. ``kv_cache_bytes`` gives the KV cache's
size directly instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinplane.data_plane.config import DataPlaneConfig, DataPlaneError
from twinplane.data_plane.host import HostMemory
from twinplane.data_plane.kv_cache import KVSpec

DEFAULT_KV_BYTES = 4 << 30  # with neither option, at most this and at most half of what is free after the weights
_RESERVE = 1 / 20  # of what is available: never planned with


class MemoryPlanError(DataPlaneError):
    """The plan does not work out; the message holds the whole table and the options to change."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be held beside the KV cache, bytes, and how much KV would be useful at most, tokens."""

    weights: int
    workspace: int
    max_model_len: int
    max_model_len_given: bool  # by the operator: then a smaller pool is an error
    useful_tokens: int  # more than this no control plane could ever use


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All sizes in bytes unless they say otherwise."""

    host: HostMemory
    budget: int  # of this process
    weights: int
    workspace: int
    spec: KVSpec
    num_blocks: int
    num_host_blocks: int  # of the swap pool
    max_model_len: int  # tokens; not more than the pool holds

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.spec.bytes_per_block

    @property
    def swap_bytes(self) -> int:
        return self.num_host_blocks * self.spec.bytes_per_block

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.spec.block_size

    def describe(self) -> str:
        """The table, for the log and for messages."""
        return "; ".join(
            (
                f"total {gib(self.host.total)}",
                f"used by others {gib(self.host.used_by_others)}",
                f"this process so far {gib(self.host.own)}",
                f"weights {gib(self.weights)}",
                f"workspace {gib(self.workspace)}",
                f"KV cache {gib(self.kv_bytes)} = {self.num_blocks} blocks of {self.spec.block_size} tokens",
                f"swap space {gib(self.swap_bytes)} = {self.num_host_blocks} blocks",
                f"{self.spec.bytes_per_token} bytes per token",
                f"{self.kv_tokens} tokens fit",
            )
        )


def make_plan(host: HostMemory, config: DataPlaneConfig, spec: KVSpec, needs: Needs) -> MemoryPlan:
    """Raises MemoryPlanError when the KV cache has no room, or less than an explicitly asked max_model_len needs, or the swap
    space none for a block."""
    num_host_blocks = config.swap_space // spec.bytes_per_block
    swap_bytes = num_host_blocks * spec.bytes_per_block
    fixed = host.own + needs.weights + needs.workspace + swap_bytes
    if config.kv_cache_bytes is not None:
        kv_bytes = config.kv_cache_bytes
        budget = fixed + kv_bytes
    elif config.memory_fraction is not None:
        budget = int(host.total * config.memory_fraction)
        kv_bytes = budget - fixed
    else:
        free = int((host.available - needs.weights - needs.workspace - swap_bytes) * (1 - _RESERVE))
        kv_bytes = min(DEFAULT_KV_BYTES, free // 2)
        budget = fixed + max(0, kv_bytes)
    num_blocks = max(0, kv_bytes) // spec.bytes_per_block
    if config.kv_cache_bytes is None:
        num_blocks = min(num_blocks, -(-needs.useful_tokens // spec.block_size))
    tokens = num_blocks * spec.block_size
    plan = MemoryPlan(host, budget, needs.weights, needs.workspace, spec, num_blocks, num_host_blocks, min(needs.max_model_len, tokens))
    _check(plan, config, needs, kv_bytes)
    return plan


def _check(plan: MemoryPlan, config: DataPlaneConfig, needs: Needs, kv_bytes: int) -> None:
    if 0 < config.swap_space < plan.spec.bytes_per_block:
        raise MemoryPlanError(
            f"a swap space of {config.swap_space} bytes does not hold one block of {plan.spec.bytes_per_block}: "
            "raise --swap-space, or leave it at 0"
        )
    if plan.num_blocks < 1:
        raise MemoryPlanError(
            f"no room for the KV cache: {max(0, kv_bytes)} bytes are left for it, one block needs {plan.spec.bytes_per_block}. "
            f"{plan.describe()}. {_advice(config)}"
        )
    growth = plan.weights + plan.workspace + plan.kv_bytes + plan.swap_bytes
    if growth > plan.host.available:
        raise MemoryPlanError(
            f"not enough memory: {gib(growth)} are still needed, {gib(plan.host.available)} are available. {plan.describe()}. "
            f"Stop what else runs on this machine, or {_lower(config)}"
        )
    if needs.max_model_len_given and plan.kv_tokens < needs.max_model_len:
        raise MemoryPlanError(
            f"max_model_len is {needs.max_model_len} tokens, but the KV cache holds only {plan.kv_tokens}. {plan.describe()}. "
            f"{_advice(config)} Or lower --max-model-len to {plan.kv_tokens}."
        )


def _advice(config: DataPlaneConfig) -> str:
    if config.kv_cache_bytes is not None:
        return f"Raise --kv-cache-bytes (now {config.kv_cache_bytes})."
    if config.memory_fraction is not None:
        return f"Raise --memory-fraction (now {config.memory_fraction} of the total, for everything this process holds)."
    return "Give this machine or cgroup more memory, or stop what else runs on it; --kv-cache-bytes sets the KV cache's size directly."


def _lower(config: DataPlaneConfig) -> str:
    if config.kv_cache_bytes is not None:
        return f"lower --kv-cache-bytes (now {config.kv_cache_bytes})."
    if config.memory_fraction is not None:
        return f"lower --memory-fraction (now {config.memory_fraction})."
    return "use a smaller model or a narrower --dtype."


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"
