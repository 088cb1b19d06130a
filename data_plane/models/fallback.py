"""Runs any Hugging Face causal LM over the paged cache, through transformers' attention interface.

The library's own forward pass computes everything but attention. The whole step goes in as one sequence of T tokens with
explicit positions (``input_ids [1, T]``, ``position_ids [1, T]``); the attention function registered here, and not a mask, keeps
the sequences apart: it writes the new keys and values to their slots and attends through the block tables.

What this needs of a model, checked before it serves: attention through the interface, positions from
``position_ids``, and the same key/value shape in every layer. A model that lacks one of them is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from twinplane.data_plane.batch import Batch
from twinplane.data_plane.kv_cache import KVCache, KVSpec, LayerKV
from twinplane.data_plane.loader import WeightError
from twinplane.data_plane.models.base import BuildContext, Model, ModelShape, UnsupportedModelError
from twinplane.kernels.registry import Ops
from twinplane.shared.log import get_logger

log = get_logger(__name__)

ATTENTION_NAME = "twinplane_paged"
_ACTIVATION_FACTOR = 12  # hidden-sized tensors alive at once in a transformers layer, intermediate ones included


@dataclass(slots=True)
class _Pass:
    """The forward pass under way: what the attention function can not get through the library's arguments."""

    batch: Batch
    cache: KVCache
    ops: Ops
    layers_seen: set[int]


_current: _Pass | None = None  # set for the duration of FallbackModel.forward; one thread runs the model


def _paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The library's attention function: query [1, H, T, D], key and value [1, G, T, D] -> ([1, T, H, D], no weights)."""
    assert _current is not None, "the paged attention function works inside FallbackModel.forward only"
    state, layer = _current, module.layer_idx
    state.layers_seen.add(layer)
    _check_shape(module, state.cache.spec.layers[layer], key, value)
    k_cache, v_cache = state.cache.k[layer], state.cache.v[layer]
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    batch = state.batch
    state.ops.write_kv(k, v, k_cache, v_cache, batch.slots)
    out = state.ops.paged_attention(
        q,
        k_cache,
        v_cache,
        batch.block_tables,
        batch.context_lens,
        batch.query_start,
        scaling if scaling is not None else q.shape[-1] ** -0.5,
        int(sliding_window or 0),
        float(softcap or 0.0),
        s_aux,
    )
    return out[None], None


def _check_shape(module: Any, planned: LayerKV, key: Tensor, value: Tensor) -> None:
    found = LayerKV(key.shape[1], key.shape[3], value.shape[3])
    if found != planned:
        raise UnsupportedModelError(
            f"{type(module).__name__} of layer {module.layer_idx} caches {found}, the config implies {planned}: "
            "models whose layers differ in key/value shape are not supported"
        )


AttentionInterface.register(ATTENTION_NAME, _paged_attention)


class FallbackModel(Model):
    computes_with_kernels = False

    def __init__(self, model: Any, ops: Ops) -> None:
        self._model = model
        self._ops = ops

    @classmethod
    def shape(cls, config: Any) -> ModelShape:
        skeleton = _skeleton(config)
        name = type(skeleton).__name__
        if _has_state(config):
            raise UnsupportedModelError(f"{name} keeps a recurrent state beside its keys and values, which has no blocks")
        if not getattr(skeleton, "_supports_attention_backend", False):
            raise UnsupportedModelError(f"{name} computes attention by itself, not through transformers' attention interface")
        layer = _layer_kv(config)
        positions = [limit for limit in (getattr(config, "max_position_embeddings", None), getattr(config, "n_positions", None)) if limit]
        return ModelShape(
            vocab_size=config.vocab_size,
            max_positions=min(positions, default=None),
            layers=(layer,) * config.num_hidden_layers,
            weight_elements=sum(p.numel() for p in skeleton.parameters()),
            activation_elements_per_token=_ACTIVATION_FACTOR * config.hidden_size,
        )

    @classmethod
    def build(cls, context: BuildContext) -> FallbackModel:
        """transformers loads the weights itself: it knows every family's renamings. The files were checked by `source`."""
        model, info = AutoModelForCausalLM.from_pretrained(
            context.path,
            dtype=context.format.dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            local_files_only=True,
        )
        if info["missing_keys"]:
            names = sorted(info["missing_keys"])
            raise WeightError(f"{context.path}: {len(names)} tensors that the model needs are missing: {', '.join(names[:5])}")
        if info["unexpected_keys"]:
            log.warning("unused_tensors", tensors=sorted(info["unexpected_keys"])[:10])
        context.source.report_all_read()
        fallback = cls(model.eval(), context.ops)
        fallback._check(context)
        return fallback

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        return self._run(_Pass(batch, cache, self._ops, set()))

    def _run(self, state: _Pass) -> Tensor:
        global _current
        batch = state.batch
        # An empty index would still be asked for logits of everything by some models: ask for one row and drop it.
        wanted = batch.sample_tokens if batch.num_samples else torch.zeros(1, dtype=torch.int64)
        _current = state
        try:
            out = self._model(input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, logits_to_keep=wanted)
        finally:
            _current = None
        logits: Tensor = out.logits[0, : batch.num_samples].float()
        return logits

    def _check(self, context: BuildContext) -> None:
        """One small pass: every layer must come through our attention, with the shape the plan assumed."""
        layers = type(self).shape(context.config).layers
        cache = KVCache(KVSpec(layers, torch.float32, 16), 1, self._ops, "cpu")
        state = _Pass(_probe_batch(), cache, self._ops, set())
        name = type(self._model).__name__
        try:
            with torch.inference_mode():
                self._run(state)
        except TypeError as error:
            raise UnsupportedModelError(f"{name} does not take flattened batches: {error}") from error
        if len(state.layers_seen) != len(layers):
            raise UnsupportedModelError(
                f"{name} sent {len(state.layers_seen)} of {len(layers)} layers through transformers' attention interface"
            )


def _probe_batch() -> Batch:
    """Two sequences of one token, in one block."""
    return Batch(
        token_ids=torch.zeros(2, dtype=torch.int64),
        positions=torch.zeros(2, dtype=torch.int64),
        slots=torch.zeros(2, dtype=torch.int64) + torch.arange(2),
        query_start=torch.tensor([0, 1, 2], dtype=torch.int32),
        context_lens=torch.ones(2, dtype=torch.int32),
        block_tables=torch.zeros(2, 1, dtype=torch.int32),
        sample_tokens=torch.tensor([0, 1]),
    )


def _skeleton(config: Any) -> Any:
    """The model without its weights."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise UnsupportedModelError(f"transformers has no causal language model for {config.model_type!r}: {error}") from error


def _layer_kv(config: Any) -> LayerKV:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return LayerKV(kv_heads, head_dim, head_dim)


def _has_state(config: Any) -> bool:
    """Layers of another kind than attention (Mamba, RWKV, linear attention, ...)."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(kinds - {"full_attention", "sliding_attention", "attention"})
