"""Chooses the model class for a Hugging Face architecture name: native, custom (entry point), or the fallback.

A package adds a model by an entry point in the group ``twinplane.models`` whose name is the architecture
(``MyForCausalLM``) and whose object is a subclass of :class:`Model`. It takes precedence over what is built in.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

from twinplane.data_plane.config import DataPlaneError
from twinplane.data_plane.models import llama
from twinplane.data_plane.models.base import Model, UnsupportedModelError
from twinplane.shared.model_files import ModelCard

ENTRY_POINT_GROUP = "twinplane.models"
NATIVE: dict[str, type[Model]] = dict.fromkeys(llama.ARCHITECTURES, llama.LlamaModel)


def model_class(card: ModelCard) -> type[Model]:
    """Raises UnsupportedModelError if nothing here can run the architecture from this format."""
    custom = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}.get(card.architecture)
    if custom is not None:
        loaded = custom.load()
        if not (isinstance(loaded, type) and issubclass(loaded, Model)):
            raise UnsupportedModelError(f"entry point {custom.value} for {card.architecture} is no subclass of {Model.__qualname__}")
        return loaded
    if card.architecture in NATIVE:
        return NATIVE[card.architecture]
    if card.format != "safetensors":
        raise UnsupportedModelError(f"{card.architecture} can be loaded from safetensors only, not from {card.format}")
    from twinplane.data_plane.models.fallback import FallbackModel  # transformers' models: seconds of imports

    return FallbackModel


def text_config(card: ModelCard) -> Any:
    """The config of the (text part of the) model, with transformers' defaults filled in.

    Where the file itself says all a native model reads, it is taken as it is: importing transformers takes seconds, and a data
    plane that was killed should be back sooner. Raises DataPlaneError if transformers does not know the model type.
    """
    if card.architecture in NATIVE and (plain := plain_config(card.config)) is not None:
        return plain
    from transformers import AutoConfig

    try:
        if card.format == "gguf":
            return AutoConfig.for_model(**card.config)
        return AutoConfig.from_pretrained(card.path).get_text_config()
    except (ValueError, KeyError, TypeError) as error:
        raise DataPlaneError(f"{card.path}: transformers can not read the model's config: {error}") from error


_REQUIRED = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")


def plain_config(config: dict[str, Any]) -> SimpleNamespace | None:
    """A Llama-family config as it stands in the file; None where it relies on defaults that only transformers knows."""
    if any(config.get(key) is None for key in _REQUIRED) or config.get("use_sliding_window"):
        return None
    if config["model_type"] == "mistral" and "sliding_window" not in config:
        return None
    if config["model_type"] == "qwen3" and config.get("head_dim") is None:
        return None
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("rope_theta") is None or "partial_rotary_factor" in {**config, **rope}:
        return None
    sliding = {} if config["model_type"] == "mistral" else {"sliding_window": None}  # without use_sliding_window the others have none
    defaults = {"tie_word_embeddings": False, "layer_types": None}
    return SimpleNamespace(**{**defaults, **config, **sliding, "rope_parameters": {"rope_type": kind, "rope_theta": rope["rope_theta"]}})
