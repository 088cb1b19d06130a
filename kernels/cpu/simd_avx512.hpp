// F16, a vector of 16 floats, on AVX-512 (F, BW, VL, DQ).
//
// simd_avx512.hpp, simd_avx2.hpp and simd_plain.hpp offer the same class in a namespace each. Nothing here may be a
// non-inlined function or a template of the standard library: the linker keeps one copy of those, and it might be the
// one compiled for a newer processor.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/kernels.hpp"

namespace twinplane::kernels::avx512 {

inline constexpr const char* kName = "avx512";
inline constexpr int kPanelVectors = 2;  // a panel is so many vectors wide
inline constexpr int kStripRows = 12;    // 24 of 32 registers accumulate
inline constexpr int kUnpackRows = 8;    // from more rows on, quantized panels are unpacked first
inline constexpr int kRegisters = 32;    // of 16 floats each

struct F16 {
  __m512 v;

  static F16 zero() { return {_mm512_setzero_ps()}; }
  static F16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static F16 load(const Bf16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  // The first n lanes (0 <= n <= 16), zero beyond; touches no memory beyond.
  static F16 load_first(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
  static F16 load_first(const Bf16* p, int64_t n) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static F16 load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static F16 load_int8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store_first(float* p, int64_t n) const { _mm512_mask_storeu_ps(p, first(n), v); }

  F16 operator+(F16 o) const { return {_mm512_add_ps(v, o.v)}; }
  F16 operator-(F16 o) const { return {_mm512_sub_ps(v, o.v)}; }
  F16 operator*(F16 o) const { return {_mm512_mul_ps(v, o.v)}; }
  F16 operator/(F16 o) const { return {_mm512_div_ps(v, o.v)}; }
  // a * b + this, rounded once.
  F16 plus_product(F16 a, F16 b) const { return {_mm512_fmadd_ps(a.v, b.v, v)}; }
  // The greater; `o` where either is NaN.
  F16 max(F16 o) const { return {_mm512_max_ps(v, o.v)}; }
  F16 min(F16 o) const { return {_mm512_min_ps(v, o.v)}; }
  F16 round() const { return {_mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  // this * 2^n for integral n >= -126.
  F16 scale_by_power(F16 n) const { return {_mm512_scalef_ps(v, n.v)}; }
  // Lanes i with begin <= i < end keep their value, the others become `fill`.
  F16 keep(int64_t begin, int64_t end, F16 fill) const {
    return {_mm512_mask_mov_ps(fill.v, static_cast<__mmask16>(first(end) & ~first(begin)), v)};
  }
  float sum() const { return _mm512_reduce_add_ps(v); }
  float greatest() const { return _mm512_reduce_max_ps(v); }
  // Whether any lane is NaN.
  bool has_nan() const { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }

 private:
  static __mmask16 first(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xFFFFu : n <= 0 ? 0u : (1u << n) - 1); }
};

// The 4-bit numbers of one k of a panel: byte i holds column i in its low and column i + 16 in its high half. The
// permutation looks at 4 bits of each index only, so it is mask, conversion and offset in one.
template <int Offset>
inline void load_nibbles(const uint8_t* p, F16 (&out)[kPanelVectors]) {
  const __m512 table = _mm512_setr_ps(0 - Offset, 1 - Offset, 2 - Offset, 3 - Offset, 4 - Offset, 5 - Offset,
                                      6 - Offset, 7 - Offset, 8 - Offset, 9 - Offset, 10 - Offset, 11 - Offset,
                                      12 - Offset, 13 - Offset, 14 - Offset, 15 - Offset);
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  out[0].v = _mm512_permutexvar_ps(bytes, table);
  out[1].v = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
}

}  // namespace twinplane::kernels::avx512
