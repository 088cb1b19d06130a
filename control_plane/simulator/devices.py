"""Device models: how long a step takes and how much KV memory there is, from JSON files. The format: docs/simulator.md."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import _simulator

_SHIPPED = Path(__file__).parent / "device_models"
_LARGEST = 1e12

# Bytes of one number in the KV cache. FP8 blocks also hold scales: at most 3.2 % more.
KV_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8_e4m3": 1.032}


class DeviceError(Exception):
    """A device model can not be read; the message names the file and the key."""


@dataclass(frozen=True)
class KvCache:
    capacity_tokens: int
    block_size: int
    dtype: str
    read_us_per_token: float  # of reading one token's keys and values, all layers


@dataclass(frozen=True)
class Swap:
    """Copies of KV blocks between device and host: every copy costs ``us_per_copy`` beside its bytes."""

    bytes_per_token: int
    bytes_per_us: float
    us_per_copy: float
    copies_per_block: int

    def time_us(self, tokens: int, block_size: int) -> float:
        """One way."""
        blocks = -(-tokens // block_size)
        return blocks * self.copies_per_block * self.us_per_copy + blocks * block_size * self.bytes_per_token / self.bytes_per_us


@dataclass(frozen=True)
class DeviceModel:
    name: str
    description: str
    source: str
    max_model_len: int
    kv: KvCache
    by_tokens_us: tuple[tuple[float, float], ...]
    fixed_us: float = 0.0
    us_per_sequence: float = 0.0
    us_per_attention_pair: float = 0.0
    includes_host_time: bool = False
    swap: Swap | None = None
    serve: Mapping[str, object] = field(default_factory=dict)  # settings of `serve` that suit the device

    def native(self, block_size: int | None = None) -> _simulator.Device:
        """``block_size``: of the KV blocks that may be swapped, if it is not the model's own."""
        size = block_size or self.kv.block_size
        return _simulator.Device(
            by_tokens_ns=[(tokens, us * 1e3) for tokens, us in self.by_tokens_us],
            fixed_ns=self.fixed_us * 1e3,
            per_sequence_ns=self.us_per_sequence * 1e3,
            per_context_token_ns=self.kv.read_us_per_token * 1e3,
            per_pair_ns=self.us_per_attention_pair * 1e3,
            per_swapped_block_ns=self.swap.time_us(size, size) * 1e3 if self.swap else 0.0,
        )

    def with_kv_dtype(self, dtype: str) -> DeviceModel:
        """The same memory and bandwidth, with KV entries of another size."""
        if dtype in ("auto", self.kv.dtype):
            return self
        share = KV_BYTES[dtype] / KV_BYTES[self.kv.dtype]
        kv = dataclasses.replace(
            self.kv, dtype=dtype, capacity_tokens=int(self.kv.capacity_tokens / share), read_us_per_token=self.kv.read_us_per_token * share
        )
        swap = self.swap and dataclasses.replace(self.swap, bytes_per_token=round(self.swap.bytes_per_token * share))
        return dataclasses.replace(self, kv=kv, swap=swap)

    def step_us(
        self, tokens: int, *, sequences: int = 1, context_tokens: int = 0, chunk_pairs: int = 0, device: _simulator.Device | None = None
    ) -> float:
        native = device or self.native()
        return native.time_ns(tokens=tokens, sequences=sequences, context_tokens=context_tokens, chunk_pairs=chunk_pairs) / 1e3


def shipped() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def load(name: str) -> DeviceModel:
    """A shipped model by name, or a model from a .json file. Raises DeviceError."""
    path = Path(name) if name.endswith(".json") else _SHIPPED / f"{name}.json"
    if not name.endswith(".json") and name not in shipped():
        raise DeviceError(f"no device {name!r}: known are {', '.join(shipped())}; or give a FILE.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeviceError(f"{path}: can not be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise DeviceError(f"{path}: not JSON: {error}") from None
    return _Reader(str(path)).device(content)


class _Reader:
    """Takes a model apart and complains about what is wrong, missing or unknown."""

    def __init__(self, where: str) -> None:
        self._where = where

    def device(self, content: Any) -> DeviceModel:
        top = self._object(content, "", ("name", "description", "source", "max_model_len", "kv", "step", "serve"), ("licence", "swap"))
        kv = self._object(top["kv"], "kv.", ("capacity_tokens", "block_size", "dtype", "read_us_per_token"))
        step = self._object(
            top["step"], "step.", ("by_tokens_us",), ("fixed_us", "us_per_sequence", "us_per_attention_pair", "includes_host_time")
        )
        if kv["dtype"] not in KV_BYTES:
            raise self._wrong("kv.dtype", kv["dtype"], f"one of {', '.join(KV_BYTES)}")
        if not isinstance(top["serve"], dict):
            raise self._wrong("serve", top["serve"], "an object of settings")
        model = DeviceModel(
            name=self._text(top, "name"),
            description=self._text(top, "description"),
            source=self._text(top, "source"),
            max_model_len=self._count(top, "", "max_model_len", 2),
            kv=KvCache(
                capacity_tokens=self._count(kv, "kv.", "capacity_tokens", 1),
                block_size=self._count(kv, "kv.", "block_size", 1),
                dtype=kv["dtype"],
                read_us_per_token=self._number(kv, "kv.", "read_us_per_token"),
            ),
            by_tokens_us=self._points(step["by_tokens_us"]),
            fixed_us=self._number(step, "step.", "fixed_us"),
            us_per_sequence=self._number(step, "step.", "us_per_sequence"),
            us_per_attention_pair=self._number(step, "step.", "us_per_attention_pair"),
            includes_host_time=step.get("includes_host_time") is True,
            swap=self._swap(top["swap"]) if "swap" in top else None,
            serve=top["serve"],
        )
        try:
            model.native()
        except ValueError as error:
            raise DeviceError(f"{self._where}: {error}") from None
        return model

    def _swap(self, content: Any) -> Swap:
        names = ("bytes_per_token", "bytes_per_us", "us_per_copy", "copies_per_block")
        swap = self._object(content, "swap.", names)
        if not self._number(swap, "swap.", "bytes_per_us"):
            raise self._wrong("swap.bytes_per_us", 0, "more than 0")
        return Swap(
            bytes_per_token=self._count(swap, "swap.", "bytes_per_token", 1),
            bytes_per_us=self._number(swap, "swap.", "bytes_per_us"),
            us_per_copy=self._number(swap, "swap.", "us_per_copy"),
            copies_per_block=self._count(swap, "swap.", "copies_per_block", 1),
        )

    def _object(self, content: Any, prefix: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
        if not isinstance(content, dict):
            raise self._wrong(prefix.rstrip(".") or "the file", content, "an object")
        for name in required:
            if name not in content:
                raise DeviceError(f"{self._where}: {prefix}{name} is missing")
        for name in content:
            if name not in (*required, *optional):
                raise DeviceError(f"{self._where}: unknown key {prefix}{name}; known are {', '.join((*required, *optional))}")
        return content

    def _wrong(self, key: str, value: object, expected: str) -> DeviceError:
        return DeviceError(f"{self._where}: {key} is {value!r:.60}, expected {expected}")

    def _text(self, content: dict[str, Any], key: str) -> str:
        if not isinstance(content[key], str):
            raise self._wrong(key, content[key], "text")
        return str(content[key])

    def _number(self, content: dict[str, Any], prefix: str, key: str) -> float:
        value = content.get(key, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
            raise self._wrong(prefix + key, value, "a number from 0")
        return float(value)

    def _count(self, content: dict[str, Any], prefix: str, key: str, least: int) -> int:
        value = content[key]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1 << 31:
            raise self._wrong(prefix + key, value, f"an integer from {least}")
        return value

    def _points(self, points: Any) -> tuple[tuple[float, float], ...]:
        if not isinstance(points, list) or not points:
            raise self._wrong("step.by_tokens_us", points, "a list of [tokens, us]")
        for point in points:
            is_pair = isinstance(point, list) and len(point) == 2
            if not is_pair or not all(isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n <= _LARGEST for n in point):
                raise self._wrong("a point of step.by_tokens_us", point, "[tokens, us], each from 0")
        return tuple((float(tokens), float(us)) for tokens, us in points)
