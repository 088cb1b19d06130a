"""Which implementation serves which device: the one place where kernels are registered.

`select("cpu")` gives the operations the models call, one attribute per name of `reference.OPERATIONS`. Implementations
of a device are listed best first; each operation comes from the first that has it. The operations of a group
(`reference.KV_GROUP`, `reference.LINEAR_GROUP`) understand each other's data and so come from the first that has *all*.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from twinplane.kernels import decoder, reference

# Modules that offer operations, best first; `reference` is the last of every list.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "cpu": ("twinplane.kernels.cpu.ops",),
    "cuda": ("twinplane.kernels.triton.ops",),
}

GROUPS: tuple[tuple[str, ...], ...] = (reference.KV_GROUP, reference.LINEAR_GROUP)


class Ops(SimpleNamespace):
    """The operations of one device, and those of `decoder` out of them. ``sources`` tells which module each came from."""

    sources: dict[str, str]

    def describe(self) -> str:
        """One line for the start-up log: implementation -> operations."""
        by_module: dict[str, list[str]] = {}
        for name, module in sorted(self.sources.items()):
            by_module.setdefault(module, []).append(name)
        return "; ".join(f"{module.removeprefix('twinplane.kernels.')}: {', '.join(names)}" for module, names in by_module.items())


def select(device: str, only: str | None = None) -> Ops:
    """The operations of `device` ("cpu", "cuda").

    `only` forces one implementation ("reference", or a module of IMPLEMENTATIONS) with `reference` for what it lacks.
    Raises ValueError for an unknown device or implementation, ImportError if a forced one can not be imported.
    """
    if device not in IMPLEMENTATIONS:
        raise ValueError(f"no kernels for device {device!r}; there are kernels for {', '.join(IMPLEMENTATIONS)}")
    return _assemble([*_modules(device, only), reference])


def _modules(device: str, only: str | None) -> list[ModuleType]:
    if only == "reference":
        return []
    if only is not None:
        if only not in IMPLEMENTATIONS[device]:
            raise ValueError(f"device {device!r} has no implementation {only!r}; it has {', '.join(IMPLEMENTATIONS[device])}")
        return [importlib.import_module(only)]
    return [module for name in IMPLEMENTATIONS[device] if (module := _import_if_built(name)) is not None]


def _import_if_built(name: str) -> ModuleType | None:
    """The module, or None where it (or the native module below it) was not built for this machine."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("twinplane.kernels"):
            return None
        raise


def _assemble(modules: Sequence[ModuleType]) -> Ops:
    chosen: dict[str, Callable[..., Any]] = {}
    sources: dict[str, str] = {}
    grouped = {name: group for group in GROUPS for name in group}
    for name in reference.OPERATIONS:
        needed = grouped.get(name, (name,))
        module = next(m for m in modules if all(hasattr(m, each) for each in needed))
        chosen[name] = getattr(module, name)
        sources[name] = module.__name__
    if not sources["linear"] == sources["rope_write_kv"] == sources["linear_rope_write_kv"]:
        chosen["linear_rope_write_kv"] = _two_calls(chosen["linear"], chosen["rope_write_kv"])
    ops = Ops(sources=sources, **chosen)
    ops.decoder_layers, ops.decoder_logits = partial(decoder.decoder_layers, ops), partial(decoder.decoder_logits, ops)
    for module in modules:
        if hasattr(module, "decoder_layers") and sources["linear"] == sources["rope_write_kv"] == module.__name__:
            ops.decoder_layers, ops.decoder_logits = module.decoder_layers, module.decoder_logits
    return ops


def _two_calls(linear: Callable[..., Any], rope_write_kv: Callable[..., Any]) -> Callable[..., Any]:
    """`reference.linear_rope_write_kv` where no one module understands both the packed weight and the cache."""

    def linear_rope_write_kv(x: Any, packed: Any, *rest: Any) -> Any:
        return rope_write_kv(linear(x, packed), *rest)

    return linear_rope_write_kv
