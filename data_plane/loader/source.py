"""What a model needs from a weight file, whatever its format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

import torch
from torch import Tensor
from twinplane.data_plane.config import DataPlaneError

Progress = Callable[[int, int], None]  # (bytes done, bytes total)


class WeightError(DataPlaneError):
    """A weight file is missing, damaged, or does not fit the config; names file and tensor."""


class WeightSource(ABC):
    """Tensors by their Hugging Face name (``model.layers.0.mlp.up_proj.weight``).

    A source remembers what was taken, so that `unused` can name what nobody asked for.
    """

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self.total_bytes = total_bytes
        self.bytes_done = 0
        self.on_progress = progress
        self._taken: set[str] = set()

    @abstractmethod
    def names(self) -> Collection[str]:
        """Every tensor the files hold, by its Hugging Face name."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def _read(self, name: str) -> Tensor:
        """The tensor in the dtype of the file (float32 for quantized types)."""

    @abstractmethod
    def _where(self, name: str) -> str:
        """The file a tensor lies in, or should lie in, for messages."""

    @abstractmethod
    def _stored_bytes(self, name: str) -> int: ...

    def has(self, name: str) -> bool:
        return name in self.names()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor, checked against the shape the config implies, converted to `dtype`; always a copy of the file.

        Raises WeightError if it is absent, of another shape, or not of a floating-point type.
        """
        self._check(name, shape)
        tensor = self._read(name)
        if not tensor.is_floating_point():
            raise WeightError(f"{self._where(name)}: tensor {name} is {tensor.dtype}, expected a floating-point type")
        self._count(name)
        return tensor.to(dtype, copy=True)

    def block_kind(self, name: str) -> str | None:
        """The quantized type a tensor is stored in, e.g. "Q4_1", if `take_blocks` can give it; None for plain numbers."""
        return None

    def take_blocks(self, name: str, shape: tuple[int, int]) -> Tensor:
        """A quantized matrix [N, K] as it is stored: uint8 [N, bytes of a row]. Raises as `take`."""
        raise WeightError(f"{self._where(name)}: tensor {name} is not quantized")

    def kept_bytes(self) -> int:
        """What all tensors take in memory where `take_blocks` gives blocks and everything else becomes float32."""
        return self.total_bytes

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if not self.has(name):
            raise WeightError(f"{self._where(name)}: tensor {name} {list(shape)}, which the config calls for, is missing")
        if self.shape(name) != shape:
            raise WeightError(f"{self._where(name)}: tensor {name} is {list(self.shape(name))}, the config calls for {list(shape)}")

    def _count(self, name: str) -> None:
        self._taken.add(name)
        self.bytes_done += self._stored_bytes(name)
        if self.on_progress is not None:
            self.on_progress(self.bytes_done, self.total_bytes)

    def report_all_read(self) -> None:
        """For a model that reads the files by other means: everything is taken, progress is complete."""
        self._taken.update(self.names())
        if self.on_progress is not None:
            self.on_progress(self.total_bytes, self.total_bytes)

    def unused(self) -> list[str]:
        """Tensors in the files that were never taken, sorted."""
        return sorted(set(self.names()) - self._taken)
