"""Weights from files: one interface (`WeightSource`), two formats (safetensors, GGUF)."""

from __future__ import annotations

from twinplane.data_plane.loader.gguf import GGUFSource
from twinplane.data_plane.loader.safetensors import SafetensorsSource
from twinplane.data_plane.loader.source import Progress, WeightError, WeightSource
from twinplane.shared.model_files import ModelCard

__all__ = ["GGUFSource", "Progress", "SafetensorsSource", "WeightError", "WeightSource", "open_weights"]


def open_weights(card: ModelCard, progress: Progress | None = None) -> WeightSource:
    """Open and check a model's weight files without reading them. Raises WeightError naming file and tensor."""
    if card.format == "gguf":
        return GGUFSource(card, progress)
    return SafetensorsSource(card, progress)
