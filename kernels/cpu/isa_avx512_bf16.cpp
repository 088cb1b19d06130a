// Attention over an FP8 cache where the processor multiplies pairs of bfloat16 numbers; for everything else such a
// processor runs isa_avx512.cpp.
//
// FP8 numbers are bfloat16 ones of the same digits once their bits are spread, three instructions for 32 of them; as
// floats it takes twice as many, and twice as many multiply. Queries and weights are rounded to bfloat16: what comes of
// keys and values that were rounded to 2^-4 is hardly coarser for 2^-9.
#include <immintrin.h>
#include <math.h>

#include "kernels/cpu/kernels.hpp"
#include "kernels/cpu/simd_avx512.hpp"

namespace twinplane::kernels::avx512_bf16 {
using namespace avx512;
}
#define TWINPLANE_ISA avx512_bf16
#include "kernels/cpu/unroll.inl"

#include "kernels/cpu/exponential.inl"

#include "kernels/cpu/attention_keys.inl"

namespace twinplane::kernels::avx512_bf16 {

// A vector holds 16 pairs, and a row pairs in the order of its numbers.
template <>
struct Dots<Fp8> {
  static constexpr bool kHas = true;

  static F16 load(const Fp8* p) { return digits(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  // The first n pairs, zeros for the others.
  static F16 load_first(const Fp8* p, int64_t n) { return digits(_mm256_maskz_loadu_epi16(first(n), p)); }
  // 16 numbers without partners.
  static F16 load_single(const Fp8* p) {
    return digits(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }

  // c + the products of both numbers of each pair.
  static F16 plus(F16 c, F16 a, F16 b) { return {_mm512_dpbf16_ps(c.v, pairs(a), pairs(b))}; }

  // The first n numbers, rounded, from number i of a row on.
  static void store_first(F16 x, int64_t n, float* row, int64_t i) {
    const __m256bh rounded = _mm512_cvtneps_pbh(x.v);
    __m256i bits;
    __builtin_memcpy(&bits, &rounded, sizeof bits);
    _mm256_mask_storeu_epi16(reinterpret_cast<uint16_t*>(row) + i, first(n), bits);
  }

 private:
  static F16 digits(__m256i bytes) {
    const __m512i words = _mm512_cvtepi8_epi16(bytes);  // with copies of the sign above
    return {
        _mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi16(words, 4), _mm512_set1_epi16(INT16_MIN | 127 << 4)))};
  }
  static __m512bh pairs(F16 x) {
    __m512bh bits;
    __builtin_memcpy(&bits, &x.v, sizeof bits);
    return bits;
  }
};

}  // namespace twinplane::kernels::avx512_bf16

#include "kernels/cpu/attention_strips.inl"

namespace twinplane::kernels::avx512 {
extern const Kernels kTable;
}

namespace twinplane::kernels::avx512_bf16 {

void attention_query(const AttentionTile& t, void* scratch) {
  if (t.type != KvType::kFp8) return avx512::kTable.attention_query(t, scratch);
  const F16 unit = F16::broadcast(kFp8Unit);
  float* row = static_cast<float*>(scratch);
  for (int64_t i = 0; i < t.tokens * t.heads; ++i, row += t.head_dim) {
    const float* query = t.query + i / t.heads * t.query_stride + i % t.heads * t.head_dim;
    for (int64_t d = 0; d < t.head_dim; d += 16) {
      const int64_t left = t.head_dim - d;
      // With a zero for the last one's partner.
      Dots<Fp8>::store_first(F16::load_first(query + d, left) * unit, (left + 1) / 2 * 2, row, d);
    }
  }
}

void attention_partition(const AttentionPartition& now, const AttentionPartition& next, SoftmaxState* states,
                         float* sums, void* scratch) {
  if (now.tile->type != KvType::kFp8) return avx512::kTable.attention_partition(now, next, states, sums, scratch);
  attention_partition_of<Fp8>(*now.tile, now.index, next, states, sums, scratch);
}

}  // namespace twinplane::kernels::avx512_bf16
