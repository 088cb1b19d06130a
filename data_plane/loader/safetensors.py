"""Safetensors directories: a single file, or shards with an index.

When a directory holds both ``.safetensors`` and ``.bin`` files, the former are used; ``.bin`` (pickle) is never read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from twinplane.data_plane.loader.source import Progress, WeightError, WeightSource
from twinplane.shared.model_files import ModelCard, is_lfs_pointer, weight_files

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class SafetensorsSource(WeightSource):
    """Checks every file completely (presence, header, length) before the first tensor is read."""

    def __init__(self, card: ModelCard, progress: Progress | None = None) -> None:
        paths = weight_files(card)
        if not paths:
            raise WeightError(_no_weights(card.path))
        self._directory = card.path
        self._entries: dict[str, tuple[Path, dict[str, Any]]] = {}
        for path in paths:
            for name, entry in read_header(path).items():
                self._entries[name] = (path, entry)
        self._index = _read_index(card.path)
        self._check_index()
        super().__init__(sum(self._stored_bytes(name) for name in self._entries), progress)
        self._open: tuple[Path, Any] | None = None

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def has(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name][1]["shape"])

    def _stored_bytes(self, name: str) -> int:
        begin, end = self._entries[name][1]["data_offsets"]
        return int(end - begin)

    def _where(self, name: str) -> str:
        if name in self._entries:
            return str(self._entries[name][0])
        return str(self._directory / self._index[name]) if name in self._index else str(self._directory)

    def _read(self, name: str) -> Tensor:
        path = self._entries[name][0]
        if self._open is None or self._open[0] != path:
            self._open = (path, safe_open(path, framework="pt"))
        tensor: Tensor = self._open[1].get_tensor(name)
        return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor

    def _check_index(self) -> None:
        """Every tensor the index promises must lie in the shard it names."""
        for name, file in self._index.items():
            if name not in self._entries or self._entries[name][0].name != file:
                raise WeightError(f"{self._directory / file}: tensor {name} is missing, though the index places it there")


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor entries of a safetensors file ({name: {dtype, shape, data_offsets}}), after checking the file's length.

    Raises WeightError: absent, git-LFS pointer, not safetensors, shorter or longer than its header says.
    """
    if not path.exists():
        raise WeightError(f"{path} is missing, though the weight index names it: download the model completely")
    if is_lfs_pointer(path):
        raise WeightError(f"{path} is a git-LFS pointer, not the weights: run `git lfs pull`")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            raise WeightError(f"{path} is no safetensors file, or is cut off inside its header ({size} bytes)")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise WeightError(f"{path} has a damaged safetensors header: {error}") from error
    header.pop("__metadata__", None)
    expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != expected:
        last = max(header, key=lambda name: header[name]["data_offsets"][1], default="(none)")
        state = "truncated" if size < expected else "too long"
        raise WeightError(f"{path} is {state}: {size} bytes, its header says {expected} (last tensor {last}): download it again")
    return header


def _read_index(directory: Path) -> dict[str, str]:
    path = directory / "model.safetensors.index.json"
    if not path.exists():
        return {}
    weight_map: dict[str, str] = json.loads(path.read_text()).get("weight_map", {})
    return weight_map


def _no_weights(directory: Path) -> str:
    others = sorted(p.name for p in directory.glob("*.bin"))
    if others:
        return f"{directory} holds only pickle weights ({', '.join(others[:3])}), which are not read: convert them to safetensors"
    return f"{directory} holds no *.safetensors file"
