"""Reads the head of a GGUF file: metadata and where each tensor lies. No torch, no copy of the weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Written here
because the `gguf` package's reader makes an object per token of the vocabulary, which takes seconds.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

# value type -> struct code; 8 is string, 9 is array
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

# ggml type -> (name, elements per block, bytes per block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


class GGUFError(ValueError):
    """The file is not a GGUF file that can be read here; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. ``shape`` is row-major (outermost first), the reverse of what the file stores."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int  # bytes from the start of the file

    @property
    def type_name(self) -> str:
        return TENSOR_TYPES[self.ggml_type][0] if self.ggml_type in TENSOR_TYPES else f"type {self.ggml_type}"

    @property
    def num_elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def num_bytes(self) -> int:
        """Raises GGUFError for a type this version can not read, or a row that is no whole number of its blocks."""
        if self.ggml_type not in TENSOR_TYPES:
            readable = ", ".join(name for name, _, _ in TENSOR_TYPES.values())
            raise GGUFError(f"tensor {self.name} has ggml type {self.ggml_type}, which can not be read; readable types: {readable}")
        _, elements, size = TENSOR_TYPES[self.ggml_type]
        if self.shape and self.shape[-1] % elements:
            raise GGUFError(f"tensor {self.name}: rows of {self.shape[-1]} are no multiple of {self.type_name}'s block of {elements}")
        return self.num_elements // elements * size


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Metadata (typed as in the file; arrays are lists) and tensors by name."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def arch(self, key: str, default: Any = None) -> Any:
        """Metadata ``<architecture>.<key>``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf(path: str | Path) -> GGUFFile:
    """Read a GGUF file's head. Raises GGUFError (not GGUF, version, truncated) and OSError."""
    path = Path(path)
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise GGUFError(f"{path} does not start with the GGUF magic")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(path, _Cursor(data))
            except (struct.error, IndexError):
                raise GGUFError(f"{path} ends inside its own header ({len(data)} bytes): the file is truncated") from None


class _Cursor:
    """A position in the mapped file."""

    __slots__ = ("at", "data")

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = len(MAGIC)

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        if length > len(self.data) - self.at:
            raise IndexError
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise GGUFError(f"unknown metadata value type {kind} at byte {self.at}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if count > len(self.data):
            raise IndexError
        if kind in _SCALARS:
            code = f"<{count}{_SCALARS[kind][1]}"
            values = list(struct.unpack_from(code, self.data, self.at))
            self.at += struct.calcsize(code)
            return values
        return [self.value(kind) for _ in range(count)]


def _parse(path: Path, cursor: _Cursor) -> GGUFFile:
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise GGUFError(f"{path} has GGUF version {version}; versions 2 and 3 (little-endian) can be read")
    num_tensors, num_pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    raw: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(num_tensors):
        name = cursor.string()
        extents = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
        raw.append((name, tuple(reversed(extents)), cursor.scalar("<I"), cursor.scalar("<Q")))
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: TensorInfo(name, shape, ggml_type, start + offset) for name, shape, ggml_type, offset in raw}
    return GGUFFile(path, version, metadata, tensors)
