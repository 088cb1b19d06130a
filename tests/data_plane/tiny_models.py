"""Tiny random models of many families, saved in Hugging Face form, and the device that serves one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from planner import CAPACITIES, MemoryRings
from twinplane.data_plane.cpu import CpuDevice
from twinplane.data_plane.kv_cache import KVSpec, choose_block_size
from twinplane.data_plane.loader import open_weights
from twinplane.data_plane.models.base import BuildContext, Model
from twinplane.data_plane.models.registry import model_class, text_config
from twinplane.data_plane.worker import Worker
from twinplane.shared.model_files import read_model_card

VOCAB = 256
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {**COMMON, "tie_word_embeddings": False, "sliding_window": 16, "query_pre_attn_scalar": 16}

# Of our own (models/llama.py).
NATIVE: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "llama tied": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama biased": lambda: transformers.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama3 rope": lambda: transformers.LlamaConfig(
        **COMMON,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama yarn": lambda: transformers.LlamaConfig(
        **COMMON,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "mistral sliding window": lambda: transformers.MistralConfig(**COMMON, sliding_window=24),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON),
    "qwen2 some layers windowed": lambda: transformers.Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON),
}
# Through transformers' attention interface (models/fallback.py).
FALLBACK: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_dim=96,
        word_embed_proj_dim=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        dropout=0.0,
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=256
    ),
    "phi3": lambda: transformers.Phi3Config(**COMMON),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GEMMA),
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, num_local_experts=4),
    "gpt-oss sinks": lambda: transformers.GptOssConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    "starcoder2": lambda: transformers.Starcoder2Config(**COMMON),
    "cohere": lambda: transformers.CohereConfig(**COMMON),
}


def make(config: Any, seed: int = 0) -> Any:
    """A model with random weights, large enough that greedy answers vary."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.05)
    model.generation_config.eos_token_id = None
    return model


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def reference_tokens(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy tokens by transformers' own generate(), one prompt at a time."""
    answers = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


class Served:
    """A model on the CPU device, with a worker over in-memory rings."""

    def __init__(
        self,
        path: Path,
        *,
        num_blocks: int = 64,
        num_host_blocks: int = 0,
        max_model_len: int = 256,
        dtype: str = "float32",
        kv_dtype: torch.dtype | None = None,
        block_size: int | None = None,
        kernels: str | None = None,
        quantization: str = "none",
        activations: str = "float",
    ) -> None:
        card = read_model_card(path)
        config = text_config(card)
        cls = model_class(card)
        self.shape = cls.shape(config)
        self.device = CpuDevice(threads=1, kernels=kernels)  # on a busy machine a second thread costs more than it gives
        self.source = open_weights(card)
        self.format = self.device.choose_format(
            dtype, card, native=cls.computes_with_kernels, quantization=quantization, activations=activations
        )
        context = BuildContext(card.path, config, self.source, self.device.ops, self.format, max_model_len)
        self.model: Model = self.device.load(cls, context)
        kv_dtype = kv_dtype or self.device.choose_kv_dtype("auto", self.format.activations)
        self.block_size = block_size or choose_block_size(self.shape.layers[0].head_dim, kv_dtype)
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.max_model_len = max_model_len
        self.spec = KVSpec(self.shape.layers, kv_dtype, self.block_size)
        self.device.allocate_kv(self.spec, num_blocks, num_host_blocks)

    def session(self) -> tuple[Worker, MemoryRings]:
        """A new session: empty rows."""
        rings = MemoryRings(CAPACITIES)
        worker = Worker(
            self.device,
            rings,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            max_model_len=self.max_model_len,
            vocab_size=self.shape.vocab_size,
        )
        return worker, rings


def prompts(lengths: tuple[int, ...] = (5, 37, 70, 18), seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
