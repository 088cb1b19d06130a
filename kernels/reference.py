"""Every operation of the data plane in plain torch: its definition, and the oracle of all other forms.

Written for clarity, not speed, and generic in dtype: given float64 tensors everything is computed in
float64. Otherwise sums, exponentials and norms run in float32 and results are returned in the dtype of the
first argument.

**How another implementation plugs in.** A module offers functions of the same names and signatures
(``kernels/registry.py`` says which module serves which device). It may leave functions out; those are taken
from here. The functions of `KV_GROUP` share the physical layout of the cache, which only they know, and those of
`LINEAR_GROUP` the form of a packed weight: each group comes from one module as a whole.

Shapes use these letters: T tokens of the step (all sequences concatenated, no padding), S sequences,
H query heads, G key/value heads (H is a multiple of G), D head dim, B block size, N blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# What a device implementation may replace.
KV_GROUP = ("allocate_kv", "write_kv", "rope_write_kv", "paged_attention", "copy_blocks")
# A packed weight is understood only by its packer.
LINEAR_GROUP = ("pack_linear", "pack_gguf", "quantize_linear", "concat_linears", "linear", "linear_silu_mul", "gather")
GGUF_KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")  # block types `pack_gguf` takes
OPERATIONS = (
    "rms_norm",
    "add_rms_norm",
    "rope_cos_sin",
    "rope",
    "silu_mul",
    "gelu_mul",
    "argmax",
    "uniforms",
    "sample",
    *LINEAR_GROUP,
    *KV_GROUP,
    "linear_rope_write_kv",
)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64, everything else accumulates in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------------------------------------- norms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang & Sennrich 2019).

    x [..., dim], weight [dim] -> [..., dim], dtype of x.
    """
    wide = x.to(_accumulation_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``total = x + residual``; returns (rms_norm(total), total), both [T, dim] in the dtype of x.

    The arguments are given away: an implementation may return `residual` updated in place.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total


# ------------------------------------------------------------------------------------------- positions


def rope_cos_sin(positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Tables of rotary embedding (Su et al. 2021) for some positions.

    positions [T] integer; inv_freq [R/2] radians per position (scaling variants differ only here and in
    `scale`, which YaRN-like variants multiply onto both tables) -> (cos, sin), each [T, R/2], dtype of inv_freq.
    """
    angle = positions.to(inv_freq.dtype)[:, None] * inv_freq[None, :]
    return angle.cos() * scale, angle.sin() * scale


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + R/2) of the first R dims of every head ("rotate-half", as Llama in Hugging Face form).

    x [T, heads, D]; cos, sin [T, R/2] with R <= D (the rest passes through) -> [T, heads, D].
    """
    half = cos.shape[-1]
    wide = x.to(_accumulation_dtype(x.dtype))
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    c, s = cos[:, None, :].to(wide.dtype), sin[:, None, :].to(wide.dtype)
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1).to(x.dtype)


# ---------------------------------------------------------------------------------------------- linear


class PackedLinear(NamedTuple):
    """What `pack_linear` makes of a weight here: nothing at all. Other implementations repack."""

    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Prepare weight [N, K] (and bias [N]) for `linear`, once, at load.

    The result is opaque to the model. An implementation that copies lets the caller drop the originals.
    """
    return PackedLinear(weight, bias)


def pack_gguf(blocks: Tensor, kind: str, bias: Tensor | None = None, activations: str = "float") -> PackedLinear:
    """As `pack_linear`, from a weight in GGUF's own blocks: uint8 [N, bytes of a row], kind of `GGUF_KINDS`.

    Stands for exactly the values ``gguf.dequantize`` gives. With ``activations="int8"`` an implementation may round x to 8 bits
    where it meets this weight, per 32 values with a scale of their own; here nothing is rounded.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return PackedLinear(torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[kind])), bias)


def quantize_linear(weight: Tensor, kind: str, bias: Tensor | None = None, activations: str = "float") -> PackedLinear:
    """`pack_gguf` of a plain weight [N, K], K a multiple of 32, rounded as GGUF's quantizers do (Q8_0, Q4_0, Q4_1)."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    return pack_gguf(torch.from_numpy(quantize(weight.float().numpy(), GGMLQuantizationType[kind])), kind, bias, activations)


def concat_linears(parts: list[PackedLinear]) -> PackedLinear:
    """The rows of all `parts`, one after the other, as one linear of the same input. Their formats may differ."""
    weight = torch.cat([part.weight for part in parts])
    if all(part.bias is None for part in parts):
        return PackedLinear(weight, None)
    biases = [torch.zeros(part.out_features, dtype=weight.dtype) if part.bias is None else part.bias for part in parts]
    return PackedLinear(weight, torch.cat(biases))


def gather(packed: PackedLinear, ids: Tensor) -> Tensor:
    """Rows of a packed weight [N, K], widened: the embedding of token ids. ids [T] int64 -> [T, K]."""
    rows = packed.weight[ids]
    return rows.to(_accumulation_dtype(rows.dtype))


def linear(x: Tensor, packed: PackedLinear, residual: Tensor | None = None) -> Tensor:
    """x W^T + bias (+ residual). x [T, K], residual [T, N] -> [T, N]. `residual` is not modified.

    Arithmetic is that of x: a narrower weight (bf16 storage) is widened.
    """
    y = F.linear(x, packed.weight.to(x.dtype), None if packed.bias is None else packed.bias.to(x.dtype))
    return y if residual is None else y + residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused projection (SwiGLU, Shazeer 2020). [T, 2 I] -> [T, I]; gate is the first half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation (GeGLU). [T, 2 I] -> [T, I]; gate is the first half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def linear_silu_mul(x: Tensor, packed: PackedLinear) -> Tensor:
    """silu_mul(linear(x, packed)) in one operation. x [T, K], weight [2 I, K] (gate rows first) -> [T, I]."""
    return silu_mul(linear(x, packed))


# ------------------------------------------------------------------------------------------ paged cache
#
# Logical layout, and the physical one of this module: K and V are [N, G, B, D]. The CPU kernels keep K in
# tiles [N, G, B/16, D, 16] (token innermost) so that one query dim meets 16 keys in one vector.


def allocate_kv(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """Cache of one layer: K and V, zeroed, dim 0 = physical block, each block contiguous.

    Zeroed because a masked score times NaN garbage would still be NaN.
    """
    shape = (num_blocks, num_kv_heads, block_size)
    return torch.zeros(*shape, head_dim, dtype=dtype, device=device), torch.zeros(*shape, v_head_dim, dtype=dtype, device=device)


def write_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store new keys and values (PagedAttention kernel 1: reshape and block write).

    key [T, G, D], value [T, G, Dv]; slots [T] int64 = block * B + offset in block; all slots are distinct.
    Converted to the cache's dtype, round to nearest even.
    """
    block_size = k_cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, offset] = key.to(k_cache.dtype)
    v_cache[block, :, offset] = value.to(v_cache.dtype)


def rope_write_kv(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """From the fused projection to a ready query: optional per-head RMS norm, rotation, cache write.

    qkv [T, (H + 2 G) D], heads of q, then k, then v; cos, sin as from `rope_cos_sin`; q_norm, k_norm [D]
    (Qwen3) -> query [T, H, D], rotated, dtype of qkv. Writes the T keys and values to `slots`.
    """
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        query = rms_norm(query, q_norm, eps)
    if k_norm is not None:
        key = rms_norm(key, k_norm, eps)
    write_kv(rope(key, cos, sin), value, k_cache, v_cache, slots)
    return rope(query, cos, sin)


def linear_rope_write_kv(
    x: Tensor,
    packed: PackedLinear,
    num_heads: int,
    num_kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """``rope_write_kv(linear(x, packed), ...)`` in one operation. x [T, K] -> query [T, H, D]."""
    qkv = linear(x, packed)
    return rope_write_kv(qkv, num_heads, num_kv_heads, cos, sin, k_cache, v_cache, slots, q_norm, k_norm, eps)


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a mixed batch over scattered blocks (Kwon et al. 2023, section 4.1).

    query [T, H, D]; block_tables [S, >= ceil(context/B)] int32, entry j = physical block of tokens
    jB .. jB+B-1 (what lies beyond a sequence's context is never read); context_lens [S] int32, tokens in the
    cache *after* this step's write; query_start [S+1] int32, sequence i owns query rows
    query_start[i] : query_start[i+1], which are the **last** tokens of its context. A decode owns one row, a
    chunk several; order is arbitrary. -> [T, H, Dv], dtype of query.

    Key j is visible to query position p if ``j <= p`` and, with sliding_window w > 0, ``j > p - w``.
    softcap c > 0: scores become ``c * tanh(score / c)`` before masking (Gemma 2). sinks [H]: one extra logit
    per head that takes part in the softmax's denominator only (Xiao et al. 2023, gpt-oss).
    Scores and softmax in float32 (float64 if query is).
    """
    wide = _accumulation_dtype(query.dtype)
    block_size, groups = k_cache.shape[2], query.shape[1] // k_cache.shape[1]
    out = query.new_empty(query.shape[0], query.shape[1], v_cache.shape[-1])
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for i, context in enumerate(contexts):
        begin, end = starts[i], starts[i + 1]
        first = _first_visible(context - (end - begin), sliding_window, block_size)
        blocks = block_tables[i, first // block_size : -(-context // block_size)].long()
        q = query[begin:end].to(wide).view(end - begin, -1, groups, query.shape[2]).permute(1, 2, 0, 3)  # [G, H/G, q, D]
        k = k_cache[blocks].to(wide).transpose(0, 1).flatten(1, 2)[:, None, : context - first]  # [G, 1, ctx, D]
        v = v_cache[blocks].to(wide).transpose(0, 1).flatten(1, 2)[:, None, : context - first]
        scores = q @ k.transpose(-1, -2) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        visible = _visible(context, end - begin, first, sliding_window, query.device)
        weights = _softmax_with_sinks(scores.masked_fill(~visible, float("-inf")), sinks)
        out[begin:end] = (weights @ v).permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)
    return out


def _first_visible(first_query: int, sliding_window: int, block_size: int) -> int:
    """First key any query of the sequence can see, rounded down to a block: blocks before it are not read."""
    if sliding_window <= 0:
        return 0
    return max(0, first_query - sliding_window + 1) // block_size * block_size


def _visible(context: int, num_queries: int, first_key: int, sliding_window: int, device: torch.device) -> Tensor:
    """Mask [num_queries, context - first_key], True where key j may be seen by the query at position p."""
    p = torch.arange(context - num_queries, context, device=device)[:, None]
    j = torch.arange(first_key, context, device=device)[None, :]
    return (j <= p) & (j > p - sliding_window) if sliding_window > 0 else j <= p


def _softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dim of [G, H/G, q, ctx]; `sinks` [H] adds one unattended logit per head."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def copy_blocks(caches: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    """cache[targets[i]] = cache[sources[i]] in every cache (PagedAttention kernel 3, for copy-on-write).

    `caches`: K and V of every layer, dim 0 = block. sources, targets [n] int64. All sources are read before any
    target is written; targets are distinct.
    """
    for cache in caches:
        cache[targets] = cache[sources]


# --------------------------------------------------------------------------------------------- sampling
#
# One row at a time and with full sorts: the definition of shared/PROTOCOL.md section 5, against which the batched
# sampler is tested. Logits are [V]; the result of one stage is the argument of the next.


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32-10 (Salmon et al., SC'11, section 3.3): four 32-bit words from a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    mask = 0xFFFFFFFF
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & mask, (product0 >> 32) ^ c3 ^ k1, product0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def uniform(seed: int, stream: int, position: int) -> float:
    """The number in [0, 1) behind the token at `position`: a pure function of its arguments (INV-10)."""
    word = philox4x32((position, stream, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))[0]
    return (word >> 8) * 2.0**-24


def uniforms(seeds: Tensor, streams: Tensor, positions: Tensor) -> Tensor:
    """`uniform` of every row. All [T] int64, seeds as the bits of unsigned numbers -> float32 [T], exact."""
    rows = zip(seeds.tolist(), streams.tolist(), positions.tolist(), strict=True)
    return torch.tensor([uniform(seed & (1 << 64) - 1, stream, position) for seed, stream, position in rows])


def edit_logits(
    logits: Tensor, bias: dict[int, float] | None = None, allowed: list[int] | None = None, suppressed: list[int] | None = None
) -> Tensor:
    """Add `bias` per token id, mask everything but `allowed`, mask `suppressed`. Masked = -inf."""
    edited = logits.clone()
    for token, amount in (bias or {}).items():
        edited[token] += amount
    if allowed is not None:
        mask = torch.ones_like(edited, dtype=torch.bool)
        mask[allowed] = False
        edited[mask] = float("-inf")
    edited[suppressed or []] = float("-inf")
    return edited


def penalize(
    logits: Tensor, prompt: list[int], output: list[int], repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0
) -> Tensor:
    """Repetition (Keskar et al. 2019, 4.1) over prompt and output, then presence and frequency over the output only."""
    penalized = logits.clone()
    seen = sorted(set(prompt) | set(output))
    penalized[seen] = torch.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
    counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=len(logits)).to(logits.dtype)
    return penalized - presence * (counts > 0) - frequency * counts


def logprob_and_rank(logits: Tensor, token: int) -> tuple[float, int]:
    """Natural log-probability of `token`, and 1 + the number of tokens more likely than it."""
    return float(logits.log_softmax(-1)[token]), int((logits > logits[token]).sum()) + 1


def kept_tokens(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> tuple[Tensor, Tensor]:
    """Token ids kept by the filters, most likely first (ties: lower id first), and their unnormalized probabilities.

    top_k 0 or >= V, top_p >= 1 and min_p 0 are off. top-p keeps the shortest prefix whose share of what top-k
    left reaches top_p (Holtzman et al. 2020), so always at least one; min-p keeps probabilities of at least min_p
    times the largest (Nguyen et al. 2024).
    """
    weights = ((logits - logits.max()) / temperature).exp()
    weights, ids = weights.sort(descending=True, stable=True)
    if 0 < top_k < len(ids):
        weights, ids = weights[:top_k], ids[:top_k]
    if top_p < 1:
        before = weights.cumsum(-1) - weights
        kept = before < top_p * weights.sum()
        kept[0] = True
        weights, ids = weights[kept], ids[kept]
    kept = weights >= min_p * weights[0]
    return ids[kept], weights[kept]


def draw(ids: Tensor, weights: Tensor, u: float) -> int:
    """Inverse CDF: the first token whose cumulative weight exceeds u times the total."""
    cumulative = weights.cumsum(-1)
    index = int((cumulative <= u * cumulative[-1]).sum())
    return int(ids[min(index, len(ids) - 1)])


def argmax(logits: Tensor) -> Tensor:
    """The likeliest token of every row (ties: lowest id); -1 for a row with NaN or without a finite greatest value.

    logits [T, V] -> int32 [T].
    """
    best = logits.argmax(-1)  # the first NaN, if there is one
    finite = logits.gather(-1, best[:, None])[:, 0].isfinite()
    return torch.where(finite, best, -1).int()


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    """The token drawn for every row: filters, then inverse CDF. -1 for a row that `argmax` marks so.

    logits [T, V]; temperature > 0, top_k int64 (see `kept_tokens`), top_p, min_p and uniforms in [0, 1), all [T] -> int32 [T].
    """
    tiny = torch.finfo(torch.float32).tiny  # below it 0 / T could be 0 / 0 where denormals are flushed
    filters = zip(temperature.clamp(min=tiny).tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    rows = zip(logits, argmax(logits).tolist(), filters, uniforms.tolist(), strict=True)
    return torch.tensor([draw(*kept_tokens(row, *cut), u) if best >= 0 else -1 for row, best, cut, u in rows], dtype=torch.int32)
