"""What the worker needs of a device. One class per kind of device, a handful of methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from twinplane.data_plane.batch import Batch
from twinplane.data_plane.host import HostMemory
from twinplane.data_plane.kv_cache import KVSpec
from twinplane.data_plane.models.base import BuildContext, Model, WeightFormat
from twinplane.kernels.registry import Ops
from twinplane.shared.model_files import ModelCard


class Device(ABC):
    """Owns the model's weights and the KV cache. Used by one thread."""

    name: str  # "cpu", "cuda"
    ops: Ops

    @abstractmethod
    def describe(self) -> str:
        """One line for the start-up log: processor, threads, kernels."""

    @abstractmethod
    def memory(self) -> HostMemory:
        """The memory that weights and KV cache come from."""

    @abstractmethod
    def choose_format(
        self, requested: str, card: ModelCard, *, native: bool, quantization: str = "none", activations: str = "float"
    ) -> WeightFormat:
        """How to hold the weights. `requested`, `quantization`, `activations`: the options ``dtype``, ``quantization``,
        ``cpu_activations``; `native`: the model computes with our kernels.

        Raises DataPlaneError, naming the alternatives, for what this device can not serve.
        """

    @abstractmethod
    def choose_kv_dtype(self, requested: str, activations: str = "float") -> torch.dtype:
        """The number format of the KV cache. `activations`: of the weights' format. Raises DataPlaneError, naming the alternatives."""

    @abstractmethod
    def load(self, model: type[Model], context: BuildContext) -> Model:
        """Build the model here. Raises WeightError, UnsupportedModelError."""

    @abstractmethod
    def allocate_kv(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> None:
        """The device's pool of blocks, and the host's pool they can be swapped to."""

    @abstractmethod
    def settle(self) -> bool:
        """A few milliseconds of what can wait until there is nothing else to do. False once nothing of it is left."""

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Run the model: write the batch's KV, return logits [R, vocab] float32 of its sampling tokens, the caller's to overwrite.

        To be called under ``torch.inference_mode``, which a loop enters once.
        """

    @abstractmethod
    def swap_out(self, swaps: NDArray[Any]) -> None:
        """Save whole KV blocks to the host's pool, `swaps` [n] wire.BLOCK_SWAP, before anything later writes KV."""

    @abstractmethod
    def swap_in(self, swaps: NDArray[Any]) -> None:
        """Restore whole KV blocks from the host's pool, `swaps` [n] wire.BLOCK_SWAP, before anything later reads KV."""

    @abstractmethod
    def copy_blocks(self, copies: NDArray[Any]) -> None:
        """Copy whole KV blocks, `copies` [n] wire.BLOCK_COPY, before anything later writes KV. Targets are distinct."""
