"""What each number format costs in quality: perplexity of a text, and how often the most likely token stays the same.

The demo model reads `quality_sample.txt` (openings of Darwin's *Origin of Species*, 1859; Carroll's *Alice*, 1865; Melville's
*Moby-Dick*, 1851; Austen's *Pride and Prejudice*, 1813) in every format the CPU device has. The weights of the file dequantized to
float32, with a float32 cache, are what the others are compared with. Values do not depend on the machine's speed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from twinplane.control_plane.text.tokenizer import load_tokenizer
from twinplane.data_plane.batch import Batch
from twinplane.data_plane.cpu import CpuDevice
from twinplane.data_plane.kv_cache import KVSpec, choose_block_size
from twinplane.data_plane.loader import open_weights
from twinplane.data_plane.models.base import BuildContext
from twinplane.data_plane.models.registry import model_class, text_config
from twinplane.shared.model_files import read_model_card

from .server import demo_model

_CHUNK = 256  # tokens per step


@dataclass(frozen=True)
class Format:
    """Options as the command line names them, and which files they are for."""

    name: str
    safetensors: bool = False
    dtype: str = "auto"
    quantization: str = "none"
    activations: str = "float"
    kv: str = "auto"


FORMATS = (
    Format("float32", dtype="float32"),
    Format("bfloat16", dtype="bfloat16"),
    Format("GGUF blocks as stored"),
    Format("GGUF blocks, int8 activations", activations="int8"),  # these bring a bfloat16 cache
    Format("GGUF blocks, int8 activations, float32 KV", activations="int8", kv="float32"),
    Format("q8", safetensors=True, quantization="q8"),
    Format("q8, int8 activations", safetensors=True, quantization="q8", activations="int8"),
    Format("q4", safetensors=True, quantization="q4"),
    Format("q4, int8 activations", safetensors=True, quantization="q4", activations="int8"),
    Format("bfloat16 KV", dtype="float32", kv="bfloat16"),
    Format("FP8 KV", dtype="float32", kv="fp8_e4m3"),
    Format("GGUF blocks, int8 activations, FP8 KV", activations="int8", kv="fp8_e4m3"),
)


@torch.inference_mode()
def _log_probabilities(path: Path, form: Format, tokens: list[int]) -> NDArray[np.float32]:
    """Of every token after each position: [T, vocab]."""
    card = read_model_card(path)
    config, cls = text_config(card), model_class(card)
    device, source = CpuDevice(), open_weights(card)
    chosen = device.choose_format(form.dtype, card, native=True, quantization=form.quantization, activations=form.activations)
    device.load(cls, BuildContext(card.path, config, source, device.ops, chosen, len(tokens)))
    layers, kv_dtype = cls.shape(config).layers, device.choose_kv_dtype(form.kv, form.activations)
    block_size = choose_block_size(layers[0].head_dim, kv_dtype)
    blocks = -(-len(tokens) // block_size)
    device.allocate_kv(KVSpec(layers, kv_dtype, block_size), blocks)
    logits = np.concatenate([device.forward(batch).numpy() for batch in _chunks(tokens, blocks)])
    return torch.from_numpy(logits).log_softmax(-1).numpy()


def _chunks(tokens: list[int], blocks: int) -> Iterator[Batch]:
    """One sequence in blocks 0, 1, ...; the logits of all its tokens."""
    for first in range(0, len(tokens), _CHUNK):
        positions = torch.arange(first, min(first + _CHUNK, len(tokens)))
        count = len(positions)
        yield Batch(
            token_ids=torch.tensor(tokens)[positions],
            positions=positions,
            slots=positions,
            query_start=torch.tensor([0, count], dtype=torch.int32),
            context_lens=torch.tensor([first + count], dtype=torch.int32),
            block_tables=torch.arange(blocks, dtype=torch.int32)[None],
            sample_tokens=torch.arange(count),
        )


def _line(form: Format, got: NDArray[np.float32], exact: NDArray[np.float32], tokens: list[int]) -> dict[str, object]:
    chosen = got[np.arange(len(tokens) - 1), tokens[1:]]
    divergence = (np.exp(exact) * (exact - got)).sum(-1)
    return {
        "format": form.name,
        "perplexity": round(float(np.exp(-chosen.mean())), 4),
        "kl_from_float32": round(float(divergence.mean()), 6),
        "same_most_likely_token": round(float((got.argmax(-1) == exact.argmax(-1)).mean()), 4),
    }


def run(tokens: int = 1024) -> dict[str, object]:
    """``formats``: per format the perplexity, the mean Kullback-Leibler divergence from float32 in nats, and the share of positions
    whose most likely token is float32's. At most ``tokens`` tokens of the sample are read."""
    from twinplane.benchmarks import reference_model

    gguf = demo_model()
    text = (Path(__file__).parent / "quality_sample.txt").read_text()
    ids = load_tokenizer(gguf).encode(text)[:tokens]
    exact = _log_probabilities(gguf, FORMATS[0], ids)
    with tempfile.TemporaryDirectory() as folder:
        reference_model.load(gguf).save_pretrained(folder)
        files = [Path(folder) if form.safetensors else gguf for form in FORMATS]
        lines = [_line(form, _log_probabilities(path, form, ids), exact, ids) for form, path in zip(FORMATS, files, strict=True)]
    return {"tokens": len(ids), "formats": lines}
