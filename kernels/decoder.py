"""All decoder layers of a step as one operation: pre-norm, grouped-query attention over the paged cache, gated MLP.
And a whole model of such layers, from token ids to logits.

`decoder_layers` and `decoder_logits` are the definitions, out of the operations of any device. A device whose operations all come
from one module may bring forms of its own (``kernels/registry.py``), which spare the Python between them: at batch 1 that is a good
part of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer. Linears are packed; norm weights float32."""

    input_norm: Tensor  # [hidden]
    qkv: Any  # hidden -> (H + 2 G) D
    q_norm: Tensor | None  # [D]: an RMS norm of each query head (Qwen3)
    k_norm: Tensor | None
    output: Any  # H D -> hidden
    mlp_norm: Tensor  # [hidden]
    gate_up: Any  # hidden -> 2 I, gate first
    down: Any  # I -> hidden
    window: int  # keys visible, the current one included; 0 = all


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """What all layers of a step share. T tokens of S sequences; see `reference.paged_attention` for the shapes."""

    num_heads: int
    num_kv_heads: int
    scale: float
    eps: float
    cos: Tensor  # [P, R / 2], of every position there may be
    sin: Tensor
    positions: Tensor  # [T] int64
    slots: Tensor  # [T]
    block_tables: Tensor
    context_lens: Tensor
    query_start: Tensor


@dataclass(frozen=True, slots=True)
class Decoder:
    """The weights of a model."""

    embedding: Any  # packed [vocabulary, hidden]
    layers: Sequence[DecoderLayer]
    norm: Tensor  # [hidden] float32
    head: Any  # hidden -> vocabulary


def decoder_logits(
    ops: Any,
    decoder: Decoder,
    token_ids: Tensor,
    step: DecoderStep,
    sample_tokens: Tensor,
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
) -> Tensor:
    """token_ids [T] int64 through all of the decoder; the logits [R, vocabulary] after those of them that `sample_tokens` [R] int64
    number. Writes the T tokens' keys and values, to one cache a layer."""
    residual = ops.decoder_layers(ops.gather(decoder.embedding, token_ids), decoder.layers, step, k_caches, v_caches)
    logits: Tensor = ops.linear(ops.rms_norm(residual[sample_tokens], decoder.norm, step.eps), decoder.head)
    return logits


def decoder_layers(
    ops: Any, residual: Tensor, layers: Sequence[DecoderLayer], step: DecoderStep, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor]
) -> Tensor:
    """residual [T, hidden] -> the same after the layers; writes the T tokens' keys and values, to one cache a layer. `residual` is
    given away: an implementation may return it updated in place."""
    rotation = step.cos[step.positions], step.sin[step.positions]
    for layer, k_cache, v_cache in zip(layers, k_caches, v_caches, strict=True):
        residual = _decoder_layer(ops, residual, layer, step, rotation, k_cache, v_cache)
    return residual


def _decoder_layer(
    ops: Any, residual: Tensor, layer: DecoderLayer, step: DecoderStep, rotation: tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    s = step
    x = ops.rms_norm(residual, layer.input_norm, s.eps)
    query = ops.linear_rope_write_kv(
        x, layer.qkv, s.num_heads, s.num_kv_heads, *rotation, k_cache, v_cache, s.slots, layer.q_norm, layer.k_norm, s.eps
    )
    attention = ops.paged_attention(query, k_cache, v_cache, s.block_tables, s.context_lens, s.query_start, s.scale, layer.window)
    residual = ops.linear(attention.flatten(1), layer.output, residual)
    x = ops.rms_norm(residual, layer.mlp_norm, s.eps)
    after: Tensor = ops.linear(ops.linear_silu_mul(x, layer.gate_up), layer.down, residual)
    return after
