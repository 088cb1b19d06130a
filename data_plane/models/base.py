"""What the worker and the devices need from a model, whoever wrote it.

A custom model is a subclass of `Model`, registered under its Hugging Face class name in the entry-point group
``twinplane.models``; see `registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from twinplane.data_plane.batch import Batch
from twinplane.data_plane.config import DataPlaneError
from twinplane.data_plane.kv_cache import KVCache, LayerKV
from twinplane.data_plane.loader import WeightSource
from twinplane.kernels.registry import Ops


class UnsupportedModelError(DataPlaneError):
    """The model can not be served; names the model and the reason."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What can be planned with before any weight is read."""

    vocab_size: int
    max_positions: int | None  # hard or trained limit of the positions, in tokens; None = no limit known
    layers: tuple[LayerKV, ...]
    weight_elements: int  # parameters held, for the memory plan
    activation_elements_per_token: int  # live at the widest point of a step, for the memory plan
    vocabulary_elements: int = 0  # of weight_elements, those of embedding and head


# --quantization: GGUF's format of the layers, and of embedding and head, whose errors every token meets directly.
QUANTIZATIONS = {"q8": ("Q8_0", "Q8_0"), "q4": ("Q4_1", "Q8_0")}
BYTES_PER_32 = {"Q8_0": 34, "Q4_1": 20}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are held in memory, and what they are multiplied with."""

    dtype: torch.dtype
    keep_blocks: bool  # matrices the file holds in blocks of 4 to 8 bits (kernels.reference.GGUF_KINDS) stay in them
    reason: str  # for people
    quantization: str | None = None  # matrices are quantized at load, a key of QUANTIZATIONS
    activations: Literal["float", "int8"] = "float"  # as quantized matrices take them

    @property
    def name(self) -> str:
        """For messages and `hello`."""
        plain = str(self.dtype).removeprefix("torch.") if self.activations == "float" else self.activations
        if self.quantization is not None:
            return f"{self.quantization}+{plain}"
        return f"gguf+{plain}" if self.keep_blocks else plain

    def bytes_held(self, shape: ModelShape, source: WeightSource) -> int:
        """What the weights will take, for the memory plan."""
        if self.quantization is not None:
            layers, vocabulary = (BYTES_PER_32[kind] for kind in QUANTIZATIONS[self.quantization])
            return ((shape.weight_elements - shape.vocabulary_elements) * layers + shape.vocabulary_elements * vocabulary) // 32
        return source.kept_bytes() if self.keep_blocks else shape.weight_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a model is built with."""

    path: Path  # model directory or file
    config: Any  # transformers PretrainedConfig of the text model
    source: WeightSource
    ops: Ops
    format: WeightFormat
    max_model_len: int


class Model(ABC):
    """A causal language model over a paged cache. Runs under ``torch.inference_mode``."""

    computes_with_kernels = True  # its heavy operations are those of `Ops`; False: torch's own, which want torch's threads

    @classmethod
    @abstractmethod
    def shape(cls, config: Any) -> ModelShape:
        """Raises UnsupportedModelError, naming the option of the config that is not supported."""

    @classmethod
    @abstractmethod
    def build(cls, context: BuildContext) -> Model:
        """Read the weights. Raises WeightError."""

    @abstractmethod
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Write the KV of the batch's tokens, and return the logits [R, vocab_size] float32 of its `sample_tokens`."""

    def memory(self) -> Mapping[str, str]:
        """What the loaded weights take, by part of the model: bytes and formats, for people."""
        return {}

    def warnings(self) -> Mapping[str, str]:
        """What a person should know about the loaded weights, by topic."""
        return {}
