"""Native CPU kernels: packed linears, paged attention, norms, RoPE, KV writes. The GIL is released while they run.

`kernels/cpu/ops.py` gives them the signatures of `kernels/reference.py`, which also defines what they compute; here every result
goes into an array of the caller.

Arrays
    CPU torch tensors (0.1 us each, through torch's DLPack C interface) or numpy arrays. bf16 is a torch bfloat16 tensor or a
    uint16 array of the same bits (numpy has no bfloat16). The last dimension is contiguous; "row stride free" is said where a
    leading stride may be anything. Nothing is converted or copied behind the caller's back: a wrong dtype, shape or stride raises
    ValueError naming the argument.

Letters, as in reference.py
    T tokens of the step, S sequences, H query heads, G key/value heads, D head dim, Dv head dim of V, B block size, N blocks.

KV cache of one layer
    ``k_cache [N, G, B / 16, D, 16]`` (token innermost: 16 keys are one vector load) and ``v_cache [N, G, B, Dv]``, both float32
    or both bf16; B a multiple of 16; each block contiguous, block stride free. FP8: uint8, ``k_cache [N, G, B / 16, D + 1, 16]``
    whose last line holds the powers of two of its 16 keys, ``v_cache [N, G, B (Dv + 1)]``, B lines and then their powers. Numbers
    are E4M3 (arXiv 2209.05433) and off by at most 1/16 of themselves or 2^-14 of the greatest of their head.

Same answer, whatever the neighbours (INV-10)
    Each output row is bit-identical whatever the batch, row order, chunking and thread count, for a given instruction set. A
    linear output is one chain of fused multiply-adds over K in ascending order, for any number of rows; with int8 activations one of
    exact integer sums of 32 products (Q6_K: 16), scaled and added in ascending order. Attention is split at
    absolute positions (every ATTENTION_SPLIT keys), the parts merged in ascending order. Denormals (below 1.2e-38) count as 0 on
    x86, whatever the caller's mode.
"""

from collections.abc import Sequence
from typing import Any, Literal, final

from twinplane.kernels.decoder import Decoder, DecoderLayer, DecoderStep

# A CPU torch.Tensor or numpy.ndarray; see "Arrays" above.
Array = Any
Activation = Literal["none", "relu", "silu", "gelu", "gelu_tanh"]
Isa = Literal["amx", "avx512_bf16", "avx512", "avx2", "plain"]
Activations = Literal["float", "int8"]

ATTENTION_SPLIT: int  # 256 keys

# ---- processor and threads

def isa() -> Isa:
    """The instruction set in use: the best this processor has, unless set_isa() chose another."""

def supported_isas() -> list[Isa]:
    """Best first; always ends with "plain". "amx" means AVX-512 and AMX-INT8 (Intel from Sapphire Rapids; Linux has to permit it), which
    multiplies int8 activations 16 rows at a time, with the bits of "avx512"; "avx512_bf16" AVX-512 and its bfloat16 products (AMD from
    Zen 4), which attention over FP8 uses; "avx512" F, BW, VL, DQ and VNNI (Intel from Cascade Lake), "avx2" AVX2, FMA and F16C."""

def set_isa(name: Isa) -> None:
    """Choose the instruction set of later calls (tests). A PackedLinear keeps the one it was packed for.
    Raises ValueError if this processor does not have it."""

def cpus_granted() -> int:
    """Processors this process may use: affinity mask, limited by the cgroup CPU quota (v1 and v2), rounded up."""

def threads() -> int: ...
def set_threads(n: int) -> None:
    """Size of the one pool, the calling thread included; starts at cpus_granted(). Idle workers sleep. Torch should be held to
    one thread beside it (torch.set_num_threads(1)). Raises ValueError unless 1 <= n <= 256."""

def populate(array: Array) -> bool:
    """Have memory behind a contiguous array, whose contents stay, before it is touched. False where the system can not."""

# ---- linear

@final
class PackedLinear:
    """``y = x W^T (+ bias)``: weights [N, K] packed once into column panels.

    With ``activations="float"`` arithmetic is float32 over the exact stored values. With "int8", for quantized weights, each 32
    values of a row of x become integers of -127 to 127 times a scale s = max |x| / 127, and products are summed as integers. Each
    value of x is off by at most s / 2, so an output by at most the sum of s / 2 |w|, beside float rounding. A row that holds inf or
    NaN gives NaN."""

    def __init__(self, weight: Array, bias: Array | None = None, dtype: Literal["float32", "bfloat16"] | None = None) -> None:
        """``weight [N, K]`` float32 or bf16 (row stride free); ``bias [N]`` float32. ``dtype`` is the storage (None: the weight's
        own); float32 given for bfloat16 storage is rounded to nearest even."""
    @staticmethod
    def from_gguf(
        blocks: Array,
        kind: Literal["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"],
        bias: Array | None = None,
        activations: Activations = "float",
    ) -> PackedLinear:
        """``blocks`` uint8 ``[N, bytes of a row]`` in GGUF's own block format (34, 18, 20 bytes per 32 weights; K-quants 144, 176,
        210 per 256). The values stand for exactly those of gguf.dequantize."""
    @staticmethod
    def quantize(
        weight: Array, kind: Literal["Q8_0", "Q4_0", "Q4_1"], bias: Array | None = None, activations: Activations = "float"
    ) -> PackedLinear:
        """Quantize ``weight [N, K]`` float32 (K a multiple of 32) as GGUF's reference quantizers do, and pack."""
    @staticmethod
    def concat(parts: Sequence[PackedLinear]) -> PackedLinear:
        """The rows of all parts, one after the other; packed weights are shared. Storage and activations may differ. Raises
        ValueError if input features or instruction sets do."""
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def kind(self) -> str:
        """float32, bfloat16 or GGUF's name; of several parts all that occur: "Q4_K+Q6_K"."""
    @property
    def activations(self) -> Activations:
        """Whether any part takes them as int8."""
    @property
    def nbytes(self) -> int:
        """Bytes of packed weights, padding included. Q4_K and Q5_K take 148 and 180 bytes per 256 weights here."""
    @property
    def isa(self) -> Isa: ...
    def __call__(self, x: Array, out: Array, residual: Array | None = None, activation: Activation = "none") -> None:
        """``out = activation(x W^T + bias) + residual``. x ``[T, K]``, out and residual ``[T, N]``, float32, row strides
        free. ``out`` may be ``residual`` itself (in place) but must not overlap ``x``."""
    def gather(self, ids: Array, out: Array) -> None:
        """``out[i] = W[ids[i]]``, dequantized: the embedding of a tied head. ids int32 or int64 ``[T]``, out float32 ``[T, K]``.
        Raises ValueError if an id is out of range."""

def linear_gated(x: Array, gate_up: PackedLinear, out: Array, activation: Activation = "silu") -> None:
    """``out = activation(x Wg^T) * (x Wu^T)``: gate_up's rows are those of the gate, then as many of up. x ``[T, K]``, out ``[T,
    N / 2]``."""

def linear_rope_write_kv(
    x: Array,
    qkv: PackedLinear,
    num_heads: int,
    num_kv_heads: int,
    cos: Array,
    sin: Array,
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    q_out: Array,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 0.0,
) -> None:
    """qkv(x), then :func:`rope_write_kv`, in one call. x ``[T, K]`` float32."""

# ---- attention and its cache

def rope_write_kv(
    qkv: Array,
    num_heads: int,
    num_kv_heads: int,
    cos: Array,
    sin: Array,
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    q_out: Array,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 0.0,
) -> None:
    """Fused projection -> ready query: optional RMS norm per head (weights ``[D]``), rotation of q and k, K and V to their slots.

    qkv ``[T, (H + 2 G) D]`` float32 (row stride free), heads of q, then k, then v. cos, sin float32 ``[T, R / 2]``, R <= D: the
    pairs (i, i + R/2) of a head are rotated (arXiv 2104.09864). slots int64 ``[T]`` = block * B + offset in the block. q_out
    ``[T, H, D]`` float32. Needs Dv = D. Raises ValueError if a slot is out of range."""

def rope(x: Array, cos: Array, sin: Array, out: Array) -> None:
    """Rotation alone. x, out ``[T, heads, D]`` float32 (may be the same array)."""

def write_kv(key: Array, value: Array, k_cache: Array, v_cache: Array, slots: Array) -> None:
    """key ``[T, G, D]``, value ``[T, G, Dv]`` float32 to their slots (bf16, FP8: rounded to nearest even)."""

def paged_attention(
    query: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    query_start: Array,
    out: Array,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
    rows: Array | None = None,
) -> None:
    """Causal attention over scattered blocks (arXiv 2309.06180, section 4.1), decodes and chunks in one call.

    query ``[T, H, D]``, out ``[T, H, Dv]`` float32; block_tables int32 ``[R, >= ceil(context / B)]`` (row stride free);
    context_lens int32 ``[S]``, tokens cached after this step's write; query_start int32 ``[S + 1]``: sequence i owns query rows
    query_start[i] : query_start[i+1], the last tokens of its context. ``rows`` int32 ``[S]``: the line of block_tables of each
    sequence (None: line i, R = S), so that a table of permanent rows is read as it lies. The query at position p sees keys j <=
    p, with sliding_window w > 0 only j > p - w. softcap c > 0: c tanh(score / c) after scaling. sinks float32 ``[H]``: one more
    logit in the denominator. Raises ValueError naming the sequence if a block id is out of range."""

def decoder_layers(
    residual: Array, layers: Sequence[DecoderLayer], step: DecoderStep, k_caches: Sequence[Array], v_caches: Sequence[Array]
) -> None:
    """decoder_layers of kernels/decoder.py in one call, ``residual [T, hidden]`` float32 (row stride free) updated in place. Norm
    weights float32; positions int64 ``[T]``, the other arrays as the single operations want them. Whatever is wrong in any layer raises
    before the first has run: ValueError (TypeError for what is no PackedLinear), naming layer and argument."""

def decoder_logits(
    decoder: Decoder,
    token_ids: Array,
    step: DecoderStep,
    sample_tokens: Array,
    k_caches: Sequence[Array],
    v_caches: Sequence[Array],
    out: Array,
) -> None:
    """decoder_logits of kernels/decoder.py in one call. token_ids ``[T]`` and sample_tokens ``[R]`` int64, out ``[R, vocabulary]``
    float32; the rest as in :func:`decoder_layers`."""

def copy_blocks(caches: Sequence[Array], sources: Array, targets: Array) -> None:
    """``cache[targets[i]] = cache[sources[i]]`` in every cache (dim 0 = block, contiguous within a block, any dtype). sources,
    targets int32 or int64 ``[n]``; all sources are read before any target is written; targets are distinct. Raises ValueError if
    a block is out of range."""

# ---- element-wise

def rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight`` per row (arXiv 1910.07467). x, out ``[T, dim]`` float32, may be the same."""

def add_rms_norm(x: Array, residual: Array, weight: Array, eps: float, out: Array) -> None:
    """``residual += x; out = rms_norm(residual)``. All ``[T, dim]``; out may be x."""

def layer_norm(x: Array, weight: Array, bias: Array, eps: float, out: Array) -> None:
    """``out = (x - mean) / sqrt(var + eps) * weight + bias`` per row (arXiv 1607.06450)."""

def gated(gate_up: Array, out: Array, activation: Activation = "silu") -> None:
    """``out = activation(gate_up[:, :I]) * gate_up[:, I:]``. gate_up ``[T, 2 I]``, out ``[T, I]`` float32."""

def argmax(logits: Array, out: Array) -> None:
    """out int32 ``[T]``: index of the greatest of ``logits [T, V]`` float32 (lowest index among equals), or -1 for a row that
    holds NaN or whose greatest value is infinite (all -inf, or an overflow)."""

def uniforms(seeds: Array, streams: Array, positions: Array, out: Array) -> None:
    """out float32 ``[T]``: the number in [0, 1) behind each token (reference.uniforms). The others int64 ``[T]``, of which seeds count
    with all 64 bits, streams and positions with the lower 32."""

def sample(logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array, uniforms: Array, out: Array) -> None:
    """out int32 ``[T]``: the token drawn for each row of ``logits [T, V]`` float32 (reference.sample), -1 for a row that argmax
    marks so. top_k int64, the others float32, all ``[T]``."""

# ---- for benchmarks and tests

def measure_read_bandwidth(megabytes: int = 256) -> float:
    """GB/s of all threads summing a buffer of this size, allocated as weights are; the best of several loops, five runs each."""

def measure_fma_rate() -> float:
    """GFLOP/s of all threads running independent fused multiply-adds in registers; the best of five runs."""

def claimed_tiles(tiles: int, delays_us: Sequence[int]) -> list[int]:
    """Run ``tiles`` tiles on the pool, worker i sleeping delays_us[i] in each; returns how many tiles each worker took."""
