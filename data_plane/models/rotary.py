"""Rotary tables for every position a model may reach, computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from twinplane.data_plane.loader import WeightSource
from twinplane.data_plane.models.base import UnsupportedModelError
from twinplane.kernels import reference

# Variants whose frequencies do not depend on the length of the sequence (or only beyond the length we allow,
# see twinplane.shared.model_files.max_positions).
_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


class Rotary:
    """``cos`` and ``sin`` [positions, rotated dims / 2] float32."""

    def __init__(self, inv_freq: Tensor, scale: float, num_positions: int) -> None:
        self.cos, self.sin = reference.rope_cos_sin(torch.arange(num_positions), inv_freq.float(), scale)

    @classmethod
    def from_config(cls, config: Any, num_positions: int, source: WeightSource | None = None) -> Rotary:
        """From a transformers config. Raises UnsupportedModelError for an unknown scaling variant.

        GGUF files of scaled models hold per-frequency divisors in a tensor ``rope_freqs.weight``; those are applied.
        """
        parameters = dict(getattr(config, "rope_parameters", None) or {})
        kind = parameters.get("rope_type", "default")
        if kind not in _KINDS:
            raise UnsupportedModelError(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(_KINDS)}")
        if kind == "default":
            inv_freq, scale = _default_frequencies(config, float(parameters["rope_theta"])), 1.0
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # seconds of imports: only where needed

            inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        if source is not None and source.has("rope_freqs.weight"):
            inv_freq = inv_freq / source.take("rope_freqs.weight", tuple(inv_freq.shape), torch.float32)
        return cls(inv_freq, float(scale), num_positions)


def _default_frequencies(config: Any, theta: float) -> Tensor:
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inv_freq: Tensor = 1.0 / theta**exponents
    return inv_freq
