"""GGUF files: tensors under their Hugging Face names, dequantized to float32 or in the file's own blocks.

Two conventions differ from Hugging Face's and are undone here: names, and for the `llama` architecture the order of the rows
of the q and k projections. There llama.cpp rotates pairs (2i, 2i+1) where Hugging Face rotates (i, i + D/2), and its converter
permutes the rows to make up for it. Other architectures are stored unpermuted.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor
from twinplane.data_plane.loader.source import Progress, WeightError, WeightSource
from twinplane.kernels.reference import GGUF_KINDS
from twinplane.shared.gguf_file import GGUFError, TensorInfo, read_gguf
from twinplane.shared.model_files import ModelCard

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Formats whose scales of 6 bits take a byte each once packed (kernels/cpu/formats.hpp).
_WIDENED = {"Q4_K": 148 / 144, "Q5_K": 180 / 176}


class GGUFSource(WeightSource):
    """Raises WeightError for unknown tensor types and for a file shorter than its tensors."""

    def __init__(self, card: ModelCard, progress: Progress | None = None) -> None:
        try:
            file = read_gguf(card.path)
            self._path = file.path
            self._tensors = {hugging_face_name(name): info for name, info in file.tensors.items()}
            self._check_length()
            total = sum(info.num_bytes for info in self._tensors.values())
        except GGUFError as error:
            raise WeightError(f"{card.path}: {error}") from error
        super().__init__(total, progress)
        self._data = np.memmap(file.path, dtype=np.uint8, mode="r")
        self._permuted_heads = _permuted_heads(card) if file.architecture == "llama" else {}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def _stored_bytes(self, name: str) -> int:
        return self._tensors[name].num_bytes

    def _where(self, name: str) -> str:
        return str(self._path)

    def block_kind(self, name: str) -> str | None:
        kind = self._tensors[name].type_name if name in self._tensors else None
        return kind if kind in GGUF_KINDS else None

    def take_blocks(self, name: str, shape: tuple[int, int]) -> Tensor:
        self._check(name, shape)
        if self.block_kind(name) is None:
            return super().take_blocks(name, shape)
        self._count(name)
        return self._in_order(name, torch.from_numpy(self._raw(self._tensors[name]).reshape(shape[0], -1)))

    def kept_bytes(self) -> int:
        total = 0
        for name, info in self._tensors.items():
            kind = self.block_kind(name) if len(info.shape) > 1 else None
            total += 4 * info.num_elements if kind is None else math.ceil(info.num_bytes * _WIDENED.get(kind, 1))
        return total

    def _read(self, name: str) -> Tensor:
        info = self._tensors[name]
        return self._in_order(name, torch.from_numpy(self._dequantized(info)).view(info.shape))

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """Rows in Hugging Face's order. A row's blocks hold that row alone, so they move as one."""
        heads = self._permuted_heads.get(name.rsplit(".", 2)[-2])
        return rows if heads is None else unpermute(rows, heads)

    def _raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        return np.array(self._data[info.offset : info.offset + info.num_bytes])

    def _dequantized(self, info: TensorInfo) -> NDArray[np.float32]:
        raw = self._raw(info)
        if info.type_name == "F32":
            return raw.view(np.float32)
        if info.type_name == "F16":
            return raw.view(np.float16).astype(np.float32)
        rows = raw.reshape(info.num_elements // info.shape[-1], -1)
        return np.ascontiguousarray(dequantize(rows, GGMLQuantizationType(info.ggml_type)), dtype=np.float32)

    def _check_length(self) -> None:
        size = self._path.stat().st_size
        for info in self._tensors.values():
            end = info.offset + info.num_bytes
            if end > size:
                raise GGUFError(f"truncated: tensor {info.name} ends at byte {end} of {size}: download the file again")


def hugging_face_name(name: str) -> str:
    """``blk.3.ffn_up.weight`` -> ``model.layers.3.mlp.up_proj.weight``; unknown names are kept as they are."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP:
        return f"{_TOP[parts[0]]}.{parts[1]}"
    return name


def unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Undo the converter's row order of a q or k projection: [heads * D, ...] from interleaved to half-split pairs."""
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _permuted_heads(card: ModelCard) -> dict[str, int]:
    assert card.num_heads is not None and card.num_kv_heads is not None
    return {"q_proj": card.num_heads, "k_proj": card.num_kv_heads}
