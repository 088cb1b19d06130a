"""The demo model in transformers, built from the GGUF by the gguf package alone: independent of our own loader."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load(path: Path) -> LlamaForCausalLM:
    """A llama-architecture GGUF with a tied head as fp32 ``LlamaForCausalLM``; greedy generation does not stop at EOS."""
    reader = gguf.GGUFReader(path)

    def value(key: str) -> object:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = int(value("attention.head_count")), int(value("attention.head_count_kv"))  # type: ignore[call-overload]
    state = {}
    for tensor in reader.tensors:
        name, weight = tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            if part in ("attn_q", "attn_k"):
                weight = _halves(weight, heads if part == "attn_q" else kv_heads)
            name = f"model.layers.{layer}.{_LAYER[part]}.weight"
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
        state[name] = torch.from_numpy(np.ascontiguousarray(weight))
    config = LlamaConfig(
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's interleaving of the rotary pairs in the rows of q and k: (pair, half) back to (half, pair)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
