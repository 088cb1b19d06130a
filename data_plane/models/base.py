"""What the worker and the devices need from a model, whoever wrote it.

A custom model is a subclass of `Model`, registered under its Hugging Face class name in the entry-point group
``twinplane.models``; see `registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are held in memory."""

    dtype: torch.dtype
    keep_blocks: bool  # matrices the file holds in 4- or 8-bit blocks (kernels.reference.GGUF_KINDS) stay in them
    reason: str  # for people

    @property
    def name(self) -> str:
        """For messages and `hello`."""
        plain = str(self.dtype).removeprefix("torch.")
        return f"gguf+{plain}" if self.keep_blocks else plain


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

    def warnings(self) -> Mapping[str, str]:
        """What a person should know about the loaded weights, by topic."""
        return {}
