"""The Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM and whatever else has their shape.

Pre-norm decoder, rotary positions, grouped-query attention, SwiGLU; per architecture: bias on q, k, v (Qwen2), RMS norm of
each query and key head (Qwen3), sliding windows (Mistral, some Qwen layers), tied or separate head. Hidden states are
float32; weights are stored in the chosen dtype and widened by the kernels.

Projections that read the same input are fused at load: q, k, v in one linear, gate and up in another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from twinplane.data_plane.batch import Batch
from twinplane.data_plane.kv_cache import KVCache, LayerKV
from twinplane.data_plane.loader import WeightError
from twinplane.data_plane.models.base import QUANTIZATIONS, BuildContext, Model, ModelShape, UnsupportedModelError
from twinplane.data_plane.models.rotary import Rotary
from twinplane.kernels.decoder import Decoder, DecoderLayer, DecoderStep
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


class LlamaModel(Model):
    def __init__(self, spec: LlamaSpec, rotary: Rotary, ops: Ops) -> None:
        self.spec = spec
        self._rotary = rotary
        self._ops = ops
        self._scale = spec.head_dim**-0.5
        self._warnings: dict[str, str] = {}
        self._decoder: Decoder  # embedding and head are the same object if tied

    # ------------------------------------------------------------------------------------------ forward

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        spec = self.spec
        step = DecoderStep(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            scale=self._scale,
            eps=spec.eps,
            cos=self._rotary.cos,
            sin=self._rotary.sin,
            positions=batch.positions,
            slots=batch.slots,
            block_tables=batch.block_tables,
            context_lens=batch.context_lens,
            query_start=batch.query_start,
        )
        logits: Tensor = self._ops.decoder_logits(self._decoder, batch.token_ids, step, batch.sample_tokens, cache.k, cache.v)
        return logits

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
            vocabulary_elements=(1 if spec.tied else 2) * spec.vocab_size * spec.hidden_size,
        )

    @classmethod
    def build(cls, context: BuildContext) -> LlamaModel:
        spec = LlamaSpec.from_config(context.config)
        model = cls(spec, Rotary.from_config(context.config, context.max_model_len, context.source), context.ops)
        load = _Loader(context, spec)
        embedding, head = load.embedding_and_head(model._warnings)
        layers = [load.layer(i, window) for i, window in enumerate(spec.windows)]
        model._decoder = Decoder(embedding, layers, load.vector("model.norm.weight", spec.hidden_size), head)
        return model

    def memory(self) -> dict[str, str]:
        embedding, layers, head = self._decoder.embedding, self._decoder.layers, self._decoder.head
        vocabulary = {id(embedding): embedding, id(head): head}
        return {
            "embedding_and_head": _held(vocabulary.values()),
            "attention": _held(linear for layer in layers for linear in (layer.qkv, layer.output)),
            "mlp": _held(linear for layer in layers for linear in (layer.gate_up, layer.down)),
        }

    def warnings(self) -> dict[str, str]:
        return self._warnings


def _held(linears: Iterable[Any]) -> str:
    """Megabytes and formats of packed linears: "24.3 MB Q4_1"."""
    held = list(linears)
    kinds = sorted({getattr(linear, "kind", "unpacked") for linear in held})
    return f"{sum(linear.nbytes for linear in held) / 1e6:.1f} MB {', '.join(kinds)}"


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
        packed = []
        for part, rows in parts.items():
            part_bias = self.vector(f"{prefix}.{part}.bias", rows) if bias else None
            packed.append(self.packed(f"{prefix}.{part}.weight", (rows, in_features), part_bias))
        return packed[0] if len(packed) == 1 else self._ops.concat_linears(packed)

    def packed(self, name: str, shape: tuple[int, int], bias: Tensor | None = None, *, vocabulary: bool = False) -> Any:
        """One matrix, in the file's blocks if they are kept, quantized if that was asked for. `vocabulary`: embedding or head."""
        ops, form = self._ops, self._format
        kind = self._source.block_kind(name)
        if form.keep_blocks and kind is not None:
            return ops.pack_gguf(self._source.take_blocks(name, shape), kind, bias, form.activations)
        if form.quantization is None:
            return ops.pack_linear(self.tensor(name, shape), bias)
        if shape[1] % 32:
            raise WeightError(
                f"tensor {name} has rows of {shape[1]} numbers, quantization {form.quantization} needs a multiple of 32: "
                "leave --quantization away, and use --dtype bfloat16 to save memory"
            )
        return ops.quantize_linear(self.tensor(name, shape), QUANTIZATIONS[form.quantization][vocabulary], bias, form.activations)

    def vocabulary(self, name: str) -> Any:
        return self.packed(name, (self._spec.vocab_size, self._spec.hidden_size), vocabulary=True)

    def layer(self, index: int, window: int) -> DecoderLayer:
        spec, at = self._spec, f"model.layers.{index}"
        query, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        return DecoderLayer(
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
            packed = self.vocabulary(embedding)
            return packed, packed
        if spec.tied and torch.equal(self.tensor(head, shape), self.tensor(embedding, shape)):
            packed = self.vocabulary(embedding)
            return packed, packed
        if spec.tied:
            warnings["head"] = f"tie_word_embeddings is true but {head} differs from the embedding: the head of the file is used"
        return self.vocabulary(embedding), self.vocabulary(head)
