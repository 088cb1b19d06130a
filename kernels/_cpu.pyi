"""Native CPU kernels: packed linears, paged attention, norms, RoPE, KV writes; the GIL is released while they run.

Arrays
    Any CPU array that speaks DLPack: numpy arrays or torch tensors. A numpy view costs 0.2 us to pass, a torch tensor
    about 3 us, so a hot path makes numpy views of its buffers once and keeps them. bf16 is a torch bfloat16 tensor, or a
    uint16 array of the same bits (numpy has no bfloat16). The last dimensions must be contiguous; where a leading stride
    may be free, it is said. Nothing is converted or copied silently: a wrong dtype, shape or stride raises ValueError naming
    the argument.

Sequences of a step
    ``seqs`` is int32/uint32 ``[num_seqs, >= 4]`` with columns (row, position, num_tokens, token_start): the words of
    ``SeqEntry`` as they lie in the step slot. ``block_table`` is int32/uint32 ``[num_rows, max_blocks]`` (row stride free). Tokens of all
    sequences are concatenated: token ``token_start + i`` stands at ``position + i`` of its sequence.

KV cache of one layer
    ``k_cache [num_blocks, num_kv_heads, head_dim, block_size]`` (transposed inside the block: 16 keys are one vector load)
    ``v_cache [num_blocks, num_kv_heads, block_size, head_dim]``
    float32 or bf16, block_size a multiple of 16; the block stride is free, so K and V of all layers may share one allocation in
    which a block is one run of bytes (then :func:`copy_blocks` is one memcpy per block).

Same answer, whatever the neighbours (INV-10)
    Every output row is bit-identical whatever the batch, row order, chunking and thread count, for a given instruction
    set: each linear output is one chain of fused multiply-adds over K in ascending order, and attention is split at fixed absolute
    positions (every 256 keys) and merged in ascending order.
"""

from collections.abc import Sequence
from typing import Any, Literal, final

# numpy.ndarray or torch.Tensor; see "Arrays" above.
Array = Any
Activation = Literal["none", "relu", "silu", "gelu", "gelu_tanh"]
Isa = Literal["avx512", "avx2", "plain"]
WeightKind = Literal["float32", "bfloat16", "Q8_0", "Q4_0", "Q4_1"]

ATTENTION_SPLIT: int  # 256: keys per partition of the softmax

# ---- processor and threads

def isa() -> Isa:
    """The instruction set in use: the best this processor has, unless set_isa() chose another."""

def supported_isas() -> list[Isa]:
    """Best first; always ends with "plain"."""

def set_isa(name: Isa) -> None:
    """Choose the instruction set of later calls (tests). A PackedLinear keeps the one it was packed for.
    Raises ValueError if this processor does not have it."""

def cpus_granted() -> int:
    """Processors this process may use: affinity mask, limited by the cgroup CPU quota (v1 and v2), rounded up."""

def threads() -> int: ...
def set_threads(n: int) -> None:
    """Size of the one pool, the calling thread included; starts at cpus_granted(). Idle workers sleep. Torch should be held to
    one thread beside it (torch.set_num_threads(1)). Raises ValueError unless 1 <= n <= 256."""

# ---- linear

@final
class PackedLinear:
    """``y = x W^T (+ bias)``: weights packed once into column panels. Arithmetic is float32 over the exact stored values."""

    def __init__(self, weight: Array, bias: Array | None = None, dtype: Literal["float32", "bfloat16"] | None = None) -> None:
        """``weight [out_features, in_features]`` float32 or bf16; ``bias [out_features]`` float32. ``dtype`` is the storage
        (None: the weight's own); float32 given for bfloat16 storage is rounded to nearest even."""
    @staticmethod
    def from_gguf(blocks: Array, kind: Literal["Q8_0", "Q4_0", "Q4_1"], bias: Array | None = None) -> PackedLinear:
        """``blocks`` uint8 ``[out_features, in_features / 32 * block_bytes]``, GGUF's own block format
        (34, 18, 20 bytes per 32 weights). Values used are exactly gguf.dequantize's."""
    @staticmethod
    def quantize(weight: Array, kind: Literal["Q8_0", "Q4_0", "Q4_1"], bias: Array | None = None) -> PackedLinear:
        """Quantize ``weight [out_features, in_features]`` float32 as GGUF's reference quantizers do, then pack. in_features must be a
        multiple of 32."""
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def kind(self) -> WeightKind: ...
    @property
    def nbytes(self) -> int:
        """Bytes of packed weights, padding included."""
    @property
    def isa(self) -> Isa: ...
    def __call__(self, x: Array, out: Array, residual: Array | None = None, activation: Activation = "none") -> None:
        """``out = activation(x W^T + bias) + residual``. x ``[n, in_features]``, out and residual ``[n, out_features]``, float32, row
        strides free. ``out`` may be ``residual`` itself (in place), not overlap ``x``."""
    def gather(self, ids: Array, out: Array) -> None:
        """``out[i] = W[ids[i]]``, dequantized: the embedding of a tied head. ids int32 [n] in [0, out_features), out float32
        [n, in_features]."""

def linear_gated(x: Array, gate: PackedLinear, up: PackedLinear, out: Array, activation: Activation = "silu") -> None:
    """``out = activation(gate(x)) * up(x)``, tile by tile. x ``[n, in]``, out ``[n, out_features]`` float32."""

def linear_qkv(
    x: Array,
    query: PackedLinear,
    key: PackedLinear,
    value: PackedLinear,
    q_out: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seqs: Array,
    cos_sin: Array | None = None,
    interleaved: bool = False,
    query_norm: Array | None = None,
    key_norm: Array | None = None,
    norm_eps: float = 1e-6,
) -> None:
    """Projections of one attention layer: Q, K, V linears, optional per-head RMSNorm (weights ``[head_dim]``), RoPE on Q and K, K and V
    written into their blocks. x ``[num_tokens, hidden]``, q_out ``[num_tokens, num_heads, head_dim]`` float32. See :func:`rope_write_kv`
    for ``cos_sin``."""

# ---- attention and its cache

def rope_write_kv(
    q: Array | None,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seqs: Array,
    cos_sin: Array | None = None,
    interleaved: bool = False,
) -> None:
    """Rotate q and k by their positions (in place) and write k, v into their blocks. q ``[num_tokens, num_heads, head_dim]`` (None: no
    query), k and v ``[num_tokens, num_kv_heads, head_dim]`` float32, token stride free. ``cos_sin`` float32
    ``[max_positions, rotary_dim]``: cosines in the first half of a line, sines in the second (None: no rotation). The first rotary_dim
    dimensions are rotated (RoFormer, arXiv 2104.09864): pairs (i, i + rotary_dim / 2), or (2i, 2i + 1) if ``interleaved``."""

def write_kv(k: Array, v: Array, k_cache: Array, v_cache: Array, block_table: Array, seqs: Array) -> None:
    """Write k, v ``[num_tokens, num_kv_heads, head_dim]`` float32 into their blocks (bf16: rounded to nearest even)."""

def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seqs: Array,
    out: Array,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Causal attention over scattered blocks (arXiv 2309.06180, section 4.1), decodes and chunks in one call. The K and V of the step's own
    tokens must have been written. q, out ``[num_tokens, num_heads, head_dim]`` float32 (token stride free); num_heads a multiple of
    num_kv_heads. The query at position p sees keys ``max(0, p - sliding_window + 1) .. p`` (0: all). ``softcap`` c > 0 replaces scores s by
    ``c tanh(s / c)`` after scaling. Tokens of no sequence are left untouched in ``out``."""

def copy_blocks(cache: Array, pairs: Array) -> None:
    """``cache[target] = cache[source]`` for each (source, target) of int32/uint32 ``pairs [n, 2]``, in order. cache ``[num_blocks, ...]``, any
    dtype, contiguous within a block. Raises ValueError if a block is out of range."""

# ---- element-wise

def rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight`` per row (arXiv 1910.07467). x, out ``[n, hidden]`` float32, may be the same."""

def add_rms_norm(x: Array, residual: Array, weight: Array, eps: float, out: Array) -> None:
    """``residual += x; out = rms_norm(residual)``."""

def layer_norm(x: Array, weight: Array, bias: Array, eps: float, out: Array) -> None:
    """``out = (x - mean) / sqrt(var + eps) * weight + bias`` per row (arXiv 1607.06450)."""

def argmax(logits: Array, out: Array) -> None:
    """out int32 ``[n]``: index of the greatest of ``logits [n, vocab]`` float32 (lowest index among equals), or -1 for a row that holds NaN
    or whose greatest value is infinite (all -inf, or an overflow)."""

# ---- for benchmarks and tests

def measure_read_bandwidth(megabytes: int = 256) -> float:
    """GB/s of all threads summing a buffer of this size; the best of three runs."""

def measure_fma_rate() -> float:
    """GFLOP/s of all threads running independent fused multiply-adds in registers; the best of three runs."""

def parallel_claims(tiles: int, delays_us: Sequence[int]) -> list[int]:
    """Run ``tiles`` empty tiles on the pool, the worker i sleeping delays_us[i] in each; returns how many tiles each worker took."""
