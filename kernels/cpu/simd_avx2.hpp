// F16, a vector of 16 floats, on AVX2 + FMA + F16C: two registers. See simd_avx512.hpp for what the functions mean.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/kernels.hpp"

namespace twinplane::kernels::avx2 {

inline constexpr const char* kName = "avx2";
inline constexpr int kPanelVectors = 1;
inline constexpr int kStripRows = 6;  // 12 of 16 registers accumulate
inline constexpr int kUnpackRows = 4;
inline constexpr int kRegisters = 8;  // of 16 floats: pairs of 256 bits

struct F16 {
  __m256 lo;
  __m256 hi;

  static F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static F16 load(const Bf16* p) { return {widen(p), widen(p + 8)}; }
  static F16 load_first(const float* p, int64_t n) {
    return {_mm256_maskload_ps(p, first(n)), _mm256_maskload_ps(p + 8, first(n - 8))};
  }
  static F16 load_first(const Bf16* p, int64_t n) {
    Bf16 copy[16] = {};
    for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
    return load(copy);
  }
  static F16 load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
  }
  static F16 load_int8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8))))};
  }
  void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
  void store_first(float* p, int64_t n) const {
    _mm256_maskstore_ps(p, first(n), lo);
    _mm256_maskstore_ps(p + 8, first(n - 8), hi);
  }

  F16 operator+(F16 o) const { return {_mm256_add_ps(lo, o.lo), _mm256_add_ps(hi, o.hi)}; }
  F16 operator-(F16 o) const { return {_mm256_sub_ps(lo, o.lo), _mm256_sub_ps(hi, o.hi)}; }
  F16 operator*(F16 o) const { return {_mm256_mul_ps(lo, o.lo), _mm256_mul_ps(hi, o.hi)}; }
  F16 operator/(F16 o) const { return {_mm256_div_ps(lo, o.lo), _mm256_div_ps(hi, o.hi)}; }
  F16 plus_product(F16 a, F16 b) const { return {_mm256_fmadd_ps(a.lo, b.lo, lo), _mm256_fmadd_ps(a.hi, b.hi, hi)}; }
  F16 max(F16 o) const { return {_mm256_max_ps(lo, o.lo), _mm256_max_ps(hi, o.hi)}; }
  F16 min(F16 o) const { return {_mm256_min_ps(lo, o.lo), _mm256_min_ps(hi, o.hi)}; }
  F16 round() const {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(lo, kNearest), _mm256_round_ps(hi, kNearest)};
  }
  F16 scale_by_power(F16 n) const { return {_mm256_mul_ps(lo, power(n.lo)), _mm256_mul_ps(hi, power(n.hi))}; }
  F16 keep(int64_t begin, int64_t end, F16 fill) const {
    const __m256 low = _mm256_castsi256_ps(_mm256_andnot_si256(first(begin), first(end)));
    const __m256 high = _mm256_castsi256_ps(_mm256_andnot_si256(first(begin - 8), first(end - 8)));
    return {_mm256_blendv_ps(fill.lo, lo, low), _mm256_blendv_ps(fill.hi, hi, high)};
  }
  float sum() const {
    const __m256 both = _mm256_add_ps(lo, hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  float greatest() const {
    const __m256 both = _mm256_max_ps(lo, hi);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  bool has_nan() const {
    return (_mm256_movemask_ps(_mm256_cmp_ps(lo, lo, _CMP_UNORD_Q)) |
            _mm256_movemask_ps(_mm256_cmp_ps(hi, hi, _CMP_UNORD_Q))) != 0;
  }

 private:
  static __m256i first(int64_t n) {
    const int count = static_cast<int>(n > 8 ? 8 : n);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m256 widen(const Bf16* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
  }
  static __m256 power(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
};

// Byte i holds column i in its low and column i + 8 in its high half.
template <int Offset>
inline void load_nibbles(const uint8_t* p, F16 (&out)[kPanelVectors]) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
  const __m256i high = _mm256_srli_epi32(bytes, 4);
  const __m256i offset = _mm256_set1_epi32(Offset);
  out[0].lo = _mm256_cvtepi32_ps(_mm256_sub_epi32(low, offset));
  out[0].hi = _mm256_cvtepi32_ps(_mm256_sub_epi32(high, offset));
}

}  // namespace twinplane::kernels::avx2
