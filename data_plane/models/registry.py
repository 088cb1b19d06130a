"""Chooses the model class for a Hugging Face architecture name: native, custom (entry point), or the fallback.

A package adds a model by an entry point in the group ``twinplane.models`` whose name is the architecture
(``MyForCausalLM``) and whose object is a subclass of :class:`Model`. It takes precedence over what is built in.
"""

from __future__ import annotations

from importlib.metadata import entry_points
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
    """The transformers config of the (text part of the) model, with that library's defaults filled in.

    Raises DataPlaneError if transformers does not know the model type.
    """
    from transformers import AutoConfig

    try:
        if card.format == "gguf":
            return AutoConfig.for_model(**card.config)
        return AutoConfig.from_pretrained(card.path).get_text_config()
    except (ValueError, KeyError, TypeError) as error:
        raise DataPlaneError(f"{card.path}: transformers can not read the model's config: {error}") from error
