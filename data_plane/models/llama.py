"""The Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM and whatever else has their shape.

Pre-norm decoder, rotary positions, grouped-query attention, SwiGLU; per architecture: bias on q, k, v (Qwen2), RMS norm of
each query and key head (Qwen3), sliding windows (Mistral, some Qwen layers), tied or separate head. Hidden states are
float32; weights are stored in the chosen dtype and widened by the kernels.

Projections that read the same input are fused at load: q, k, v in one matrix, gate and up in another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from twinplane.data_plane.batch import Batch
from twinplane.data_plane.kv_cache import KVCache, LayerKV
from twinplane.data_plane.loader import WeightError
from twinplane.data_plane.models.base import BuildContext, Model, ModelShape, UnsupportedModelError
from twinplane.data_plane.models.rotary import Rotary
from twinplane.kernels.registry import Ops

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class LlamaSpec:
    """The family's choices, read from a Hugging Face config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    windows: tuple[int, ...]  # per layer, 0 = full attention
    tied: bool

    @classmethod
    def from_config(cls, config: Any) -> LlamaSpec:
        if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
            raise UnsupportedModelError(f"{config.model_type}: hidden_act {config.hidden_act!r} is not supported, only silu")
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        if heads % kv_heads:
            raise UnsupportedModelError(f"{config.model_type}: {heads} attention heads are no multiple of {kv_heads} key/value heads")
        bias = bool(getattr(config, "attention_bias", False))
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            eps=config.rms_norm_eps,
            qkv_bias=bias or config.model_type == "qwen2",
            output_bias=bias and config.model_type != "qwen2",
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            head_norms=config.model_type == "qwen3",
            windows=_windows(config),
            tied=bool(config.tie_word_embeddings),
        )

    @property
    def qkv_features(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def _windows(config: Any) -> tuple[int, ...]:
    """Sliding window of each layer in tokens, the current one included; 0 = none."""
    window = int(getattr(config, "sliding_window", None) or 0)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return (window if config.model_type == "mistral" else 0,) * int(config.num_hidden_layers)


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Any  # packed linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Any
    mlp_norm: Tensor
    gate_up: Any
    down: Any
    window: int


class LlamaModel(Model):
    def __init__(self, spec: LlamaSpec, rotary: Rotary, ops: Ops) -> None:
        self.spec = spec
        self._rotary = rotary
        self._ops = ops
        self._scale = spec.head_dim**-0.5
        self._warnings: dict[str, str] = {}
        self._embedding: Any  # packed linear; the head as well if tied
        self._layers: list[_Layer] = []
        self._norm: Tensor
        self._head: Any

    # ------------------------------------------------------------------------------------------ forward

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """The residual stream is `residual`; `x` is the part not yet added to it."""
        ops, eps = self._ops, self.spec.eps
        cos, sin = self._rotary(batch.positions)
        residual = ops.gather(self._embedding, batch.token_ids)
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            attention = self._attention(layer, x, batch, cos, sin, cache.k[i], cache.v[i])
            x, residual = ops.add_rms_norm(ops.linear(attention, layer.output), residual, layer.mlp_norm, eps)
            x = ops.linear(ops.linear_silu_mul(x, layer.gate_up), layer.down)
            following = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else None
            if following is not None:
                x, residual = ops.add_rms_norm(x, residual, following, eps)
        wanted = batch.sample_tokens
        x, _ = ops.add_rms_norm(x[wanted], residual[wanted], self._norm, eps)
        logits: Tensor = ops.linear(x, self._head)
        return logits

    def _attention(self, layer: _Layer, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """[T, hidden] -> [T, H * D], before the output projection."""
        ops, spec = self._ops, self.spec
        query = ops.rope_write_kv(
            ops.linear(x, layer.qkv),
            spec.num_heads,
            spec.num_kv_heads,
            cos,
            sin,
            k_cache,
            v_cache,
            batch.slots,
            layer.q_norm,
            layer.k_norm,
            spec.eps,
        )
        out: Tensor = ops.paged_attention(
            query, k_cache, v_cache, batch.block_tables, batch.context_lens, batch.query_start, self._scale, layer.window
        )
        return out.flatten(1)

    # --------------------------------------------------------------------------------------------- load

    @classmethod
    def shape(cls, config: Any) -> ModelShape:
        spec = LlamaSpec.from_config(config)
        layers = len(spec.windows)
        per_layer = spec.hidden_size * (spec.qkv_features + spec.num_heads * spec.head_dim + 3 * spec.intermediate_size + 2)
        return ModelShape(
            vocab_size=spec.vocab_size,
            max_positions=None,
            layers=(LayerKV(spec.num_kv_heads, spec.head_dim, spec.head_dim),) * layers,
            weight_elements=layers * per_layer + (1 if spec.tied else 2) * spec.vocab_size * spec.hidden_size,
            activation_elements_per_token=4 * spec.hidden_size + 2 * spec.qkv_features + 3 * spec.intermediate_size,
        )

    @classmethod
    def build(cls, context: BuildContext) -> LlamaModel:
        spec = LlamaSpec.from_config(context.config)
        model = cls(spec, Rotary.from_config(context.config, context.max_model_len, context.source), context.ops)
        load = _Loader(context, spec)
        model._embedding, model._head = load.embedding_and_head(model._warnings)
        model._layers = [load.layer(i, window) for i, window in enumerate(spec.windows)]
        model._norm = load.vector("model.norm.weight", spec.hidden_size)
        return model

    def warnings(self) -> dict[str, str]:
        return self._warnings


class _Loader:
    """Names and shapes of the family's tensors, fused and packed."""

    def __init__(self, context: BuildContext, spec: LlamaSpec) -> None:
        self._source, self._format, self._ops, self._spec = context.source, context.format, context.ops, spec

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.take(name, shape, self._format.dtype)

    def vector(self, name: str, size: int) -> Tensor:
        """Norm weights and biases stay float32: they are small, and the kernels want them so."""
        return self._source.take(name, (size,), torch.float32)

    def fused(self, prefix: str, parts: dict[str, int], in_features: int, bias: bool) -> Any:
        """One packed linear of the rows of several; `parts` maps a projection's name to its number of rows."""
        biases = [self.vector(f"{prefix}.{part}.bias", rows) for part, rows in parts.items()] if bias else None
        return self.packed({f"{prefix}.{part}.weight": rows for part, rows in parts.items()}, in_features, biases)

    def packed(self, tensors: dict[str, int], in_features: int, biases: list[Tensor] | None = None) -> Any:
        """One packed linear of the rows of all `tensors` (name to number of rows), in the file's blocks if it has them."""
        bias = torch.cat(biases) if biases else None
        kinds = {self._source.block_kind(name) for name in tensors}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is not None and self._format.keep_blocks:
            blocks = [self._source.take_blocks(name, (rows, in_features)) for name, rows in tensors.items()]
            return self._ops.pack_gguf(torch.cat(blocks), kind, bias)
        weights = [self.tensor(name, (rows, in_features)) for name, rows in tensors.items()]
        return self._ops.pack_linear(torch.cat(weights) if len(weights) > 1 else weights[0], bias)

    def layer(self, index: int, window: int) -> _Layer:
        spec, at = self._spec, f"model.layers.{index}"
        query, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        return _Layer(
            input_norm=self.vector(f"{at}.input_layernorm.weight", spec.hidden_size),
            qkv=self.fused(attention, {"q_proj": query, "k_proj": keys, "v_proj": keys}, spec.hidden_size, spec.qkv_bias),
            q_norm=self.vector(f"{attention}.q_norm.weight", spec.head_dim) if spec.head_norms else None,
            k_norm=self.vector(f"{attention}.k_norm.weight", spec.head_dim) if spec.head_norms else None,
            output=self.fused(attention, {"o_proj": spec.hidden_size}, query, spec.output_bias),
            mlp_norm=self.vector(f"{at}.post_attention_layernorm.weight", spec.hidden_size),
            gate_up=self.fused(mlp, dict.fromkeys(("gate_proj", "up_proj"), spec.intermediate_size), spec.hidden_size, spec.mlp_bias),
            down=self.fused(mlp, {"down_proj": spec.hidden_size}, spec.intermediate_size, spec.mlp_bias),
            window=window,
        )

    def embedding_and_head(self, warnings: dict[str, str]) -> tuple[Any, Any]:
        """Both packed, the same object if tied. A head in the file wins over the config's flag; without either, refuse."""
        spec, source = self._spec, self._source
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        shape = (spec.vocab_size, spec.hidden_size)
        if not source.has(head):
            if not spec.tied:
                raise WeightError(
                    f"the config says tie_word_embeddings: false but the files hold no {head}: "
                    "if the head is meant to be the embedding, set tie_word_embeddings to true in config.json"
                )
            packed = self.packed({embedding: spec.vocab_size}, spec.hidden_size)
            return packed, packed
        if spec.tied and torch.equal(self.tensor(head, shape), self.tensor(embedding, shape)):
            packed = self.packed({embedding: spec.vocab_size}, spec.hidden_size)
            return packed, packed
        if spec.tied:
            warnings["head"] = f"tie_word_embeddings is true but {head} differs from the embedding: the head of the file is used"
        return self.packed({embedding: spec.vocab_size}, spec.hidden_size), self.packed({head: spec.vocab_size}, spec.hidden_size)
