// F16, a vector of 16 floats, on AVX-512 (F, BW, VL, DQ, VNNI).
//
// simd_avx512.hpp, simd_avx2.hpp and simd_plain.hpp offer the same class in a namespace each. Nothing here may be a
// non-inlined function or a template of the standard library: the linker keeps one copy of those, and it might be the
// one compiled for a newer processor.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/half.hpp"
#include "kernels/cpu/kernels.hpp"

namespace twinplane::kernels::avx512 {

inline constexpr const char* kName = "avx512";
inline constexpr int kPanelVectors = 2;  // a panel is so many vectors wide
inline constexpr int kStripRows = 12;    // 24 of 32 registers accumulate
inline constexpr int kUnpackRows = 6;    // from more rows on, quantized panels are unpacked first
inline constexpr int kIntegerRows = 8;   // rows of an integer product: 16 registers accumulate
inline constexpr int kRegisters = 32;    // of 16 floats each

// The first n lanes, of 16.
inline __mmask16 first(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xFFFFu : n <= 0 ? 0u : (1u << n) - 1); }

struct F16 {
  __m512 v;

  static F16 zero() { return {_mm512_setzero_ps()}; }
  static F16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static F16 load(const Bf16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  // The even or the odd ones of 32 numbers.
  static F16 load_even(const Bf16* p) { return even(_mm512_loadu_si512(p)); }
  static F16 load_odd(const Bf16* p) { return odd(_mm512_loadu_si512(p)); }
  // Of the first 2 n.
  static F16 load_first_even(const Bf16* p, int64_t n) { return even(_mm512_maskz_loadu_epi32(first(n), p)); }
  static F16 load_first_odd(const Bf16* p, int64_t n) { return odd(_mm512_maskz_loadu_epi32(first(n), p)); }
  // FP8 numbers times 2^-120: as floats of the same digits.
  static F16 load(const Fp8* p) {
    return fp8<20>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static F16 load_even(const Fp8* p) { return fp8<20>(words(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))); }
  static F16 load_odd(const Fp8* p) { return fp8<4>(words(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))); }
  static F16 load_first_even(const Fp8* p, int64_t n) { return fp8<20>(words(_mm256_maskz_loadu_epi16(first(n), p))); }
  static F16 load_first_odd(const Fp8* p, int64_t n) { return fp8<4>(words(_mm256_maskz_loadu_epi16(first(n), p))); }
  // kFp8PowerUnit * 2^(byte - 127). 0 for byte 0, infinite for 255.
  static F16 load_powers(const uint8_t* p) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(wide, 23)), _mm512_set1_ps(kFp8PowerUnit))};
  }
  // The first n lanes (0 <= n <= 16), zero beyond; touches no memory beyond.
  static F16 load_first(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
  static F16 load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static F16 load_int8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  // Of integral values from -127 to 127. Returns their sum.
  int32_t store_int8(int8_t* p) const {
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
    return sum_of_bytes(bytes);
  }
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
  // this * 2^n for integral n < 128; less than -126 may count as -126.
  F16 scale_by_power(F16 n) const { return {_mm512_scalef_ps(v, n.v)}; }
  // Lanes i with begin <= i < end keep their value, the others become `fill`.
  F16 keep(int64_t begin, int64_t end, F16 fill) const {
    return {_mm512_mask_mov_ps(fill.v, static_cast<__mmask16>(first(end) & ~first(begin)), v)};
  }
  float sum() const { return _mm512_reduce_add_ps(v); }
  float greatest() const { return _mm512_reduce_max_ps(v); }
  // Of 32 values; NaN if one is. Without its sign a float orders as its bits do, infinity and NaN last.
  static float greatest_magnitude(F16 a, F16 b) {
    const __m512i sign = _mm512_set1_epi32(INT32_MIN);
    const __m512i greatest = _mm512_max_epi32(_mm512_andnot_si512(sign, _mm512_castps_si512(a.v)),
                                              _mm512_andnot_si512(sign, _mm512_castps_si512(b.v)));
    return bits_float(static_cast<uint32_t>(_mm512_reduce_max_epi32(greatest)));
  }
  // Whether any lane is NaN.
  bool has_nan() const { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }
  // Whether any lane is at least x.
  bool reaches(float x) const { return _mm512_cmp_ps_mask(v, _mm512_set1_ps(x), _CMP_GE_OQ) != 0; }

 private:
  static int32_t sum_of_bytes(__m128i bytes) {
    const __m128i halves = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(halves) + _mm_extract_epi16(halves, 4) - 16 * 128;
  }
  // Of numbers with copies of their sign above them: the lower seven bits go to 20 .. 26, the sign where it belongs.
  template <int Shift>
  static F16 fp8(__m512i numbers) {
    return {_mm512_castsi512_ps(
        _mm512_and_si512(_mm512_slli_epi32(numbers, Shift), _mm512_set1_epi32(INT32_MIN | 127 << 20)))};
  }
  static __m512i words(__m256i bytes) { return _mm512_cvtepi8_epi16(bytes); }
  static F16 even(__m512i pairs) { return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))}; }
  static F16 odd(__m512i pairs) {
    return {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(INT32_MIN >> 15)))};
  }
};

// 16 lanes of 4 bytes: numbers of 16 columns, or one quad of x for all of them.
struct Words {
  __m512i v;

  static Words load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  static Words broadcast(const int8_t* p) {
    int32_t quad;
    __builtin_memcpy(&quad, p, sizeof quad);
    return {_mm512_set1_epi32(quad)};
  }
  // The low (0) or high (1) halves of all bytes.
  template <int High>
  Words nibbles() const {
    return {_mm512_and_si512(High ? _mm512_srli_epi32(v, 4) : v, _mm512_set1_epi8(15))};
  }
  // With the lowest Bits of each byte of `high` above the low half.
  template <int Bits>
  Words with_high(Words high) const {
    const __m512i bits = _mm512_and_si512(high.v, _mm512_set1_epi8((1 << Bits) - 1));
    return {_mm512_or_si512(v, _mm512_slli_epi32(bits, 4))};
  }
  template <int Bits>
  Words shifted() const {
    return {_mm512_srli_epi32(v, Bits)};
  }
  // Byte J of each lane as a float.
  template <int J>
  F16 byte() const {
    return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(v, 8 * J), _mm512_set1_epi32(255)))};
  }
  template <int J>
  F16 signed_byte() const {
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * J), 24))};
  }
  // Byte J, below 16, less Offset. The permutation looks at 4 bits of each index only, so it is mask, conversion and
  // offset in one.
  template <int J, int Offset>
  F16 nibble() const {
    const __m512 table = _mm512_setr_ps(0 - Offset, 1 - Offset, 2 - Offset, 3 - Offset, 4 - Offset, 5 - Offset,
                                        6 - Offset, 7 - Offset, 8 - Offset, 9 - Offset, 10 - Offset, 11 - Offset,
                                        12 - Offset, 13 - Offset, 14 - Offset, 15 - Offset);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(v, 8 * J), table)};
  }
};

// Sums of products of numbers (0 .. Greatest, or Signed) and bytes of x (-127 .. 127), a lane for each column.
template <int Greatest, bool Signed>
struct Dot {
  static constexpr int32_t kOffset = Signed ? 128 : 0;  // numbers count as so much more
  __m512i v;

  static Dot zero() { return {_mm512_setzero_si512()}; }
  void add(Words numbers, Words quad) {
    // Flipping the highest bit adds 128, and makes unsigned numbers of signed ones.
    const __m512i bytes = Signed ? _mm512_xor_si512(numbers.v, _mm512_set1_epi8(-128)) : numbers.v;
    v = _mm512_dpbusd_epi32(v, bytes, quad.v);
  }
  F16 minus(int32_t correction) const {
    return {_mm512_cvtepi32_ps(_mm512_sub_epi32(v, _mm512_set1_epi32(correction)))};
  }
};

}  // namespace twinplane::kernels::avx512
