// F16, a vector of 16 floats, on AVX2 + FMA + F16C: two registers. See simd_avx512.hpp for what the functions mean.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/half.hpp"
#include "kernels/cpu/kernels.hpp"

namespace twinplane::kernels::avx2 {

inline constexpr const char* kName = "avx2";
inline constexpr int kPanelVectors = 1;
inline constexpr int kStripRows = 6;  // 12 of 16 registers accumulate
inline constexpr int kUnpackRows = 3;
inline constexpr int kIntegerRows = 4;
inline constexpr int kRegisters = 8;  // of 16 floats: pairs of 256 bits

struct F16 {
  __m256 lo;
  __m256 hi;

  static F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static F16 load(const Bf16* p) { return {widen(p), widen(p + 8)}; }
  static F16 load_even(const Bf16* p) { return {even(pairs(p)), even(pairs(p + 16))}; }
  static F16 load_odd(const Bf16* p) { return {odd(pairs(p)), odd(pairs(p + 16))}; }
  static F16 load_first_even(const Bf16* p, int64_t n) {
    return {even(first_pairs(p, n)), even(first_pairs(p + 16, n - 8))};
  }
  static F16 load_first_odd(const Bf16* p, int64_t n) {
    return {odd(first_pairs(p, n)), odd(first_pairs(p + 16, n - 8))};
  }
  static F16 load(const Fp8* p) { return {fp8<20>(dwords(p)), fp8<20>(dwords(p + 8))}; }
  static F16 load_even(const Fp8* p) { return {fp8<20>(words(p)), fp8<20>(words(p + 16))}; }
  static F16 load_odd(const Fp8* p) { return {fp8<4>(words(p)), fp8<4>(words(p + 16))}; }
  static F16 load_first_even(const Fp8* p, int64_t n) { return load_even(FirstPairs(p, n).bytes); }
  static F16 load_first_odd(const Fp8* p, int64_t n) { return load_odd(FirstPairs(p, n).bytes); }
  static F16 load_powers(const uint8_t* p) { return {power_of(p), power_of(p + 8)}; }
  static F16 load_first(const float* p, int64_t n) {
    return {_mm256_maskload_ps(p, first(n)), _mm256_maskload_ps(p + 8, first(n - 8))};
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
  // Of integral values from -127 to 127. Returns their sum.
  int32_t store_int8(int8_t* p) const {
    const __m256i wide[2] = {_mm256_cvtps_epi32(lo), _mm256_cvtps_epi32(hi)};
    __m128i words[2];
    for (int i = 0; i < 2; ++i)
      words[i] = _mm_packs_epi32(_mm256_castsi256_si128(wide[i]), _mm256_extracti128_si256(wide[i], 1));
    const __m128i bytes = _mm_packs_epi16(words[0], words[1]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
    return sum_of_bytes(bytes);
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
  bool reaches(float x) const {
    const __m256 least = _mm256_set1_ps(x);
    return (_mm256_movemask_ps(_mm256_cmp_ps(lo, least, _CMP_GE_OQ)) |
            _mm256_movemask_ps(_mm256_cmp_ps(hi, least, _CMP_GE_OQ))) != 0;
  }
  static float greatest_magnitude(F16 a, F16 b) {
    const __m256i both = greater(greater(a.lo, a.hi), greater(b.lo, b.hi));
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    const __m128i one = _mm_max_epi32(two, _mm_shuffle_epi32(two, 0xB1));
    return bits_float(static_cast<uint32_t>(_mm_cvtsi128_si32(one)));
  }

 private:
  static int32_t sum_of_bytes(__m128i bytes) {
    const __m128i halves = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(halves) + _mm_extract_epi16(halves, 4) - 16 * 128;
  }
  // Of magnitudes, as bits.
  static __m256i greater(__m256 a, __m256 b) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return _mm256_max_epi32(_mm256_castps_si256(_mm256_andnot_ps(sign, a)),
                            _mm256_castps_si256(_mm256_andnot_ps(sign, b)));
  }
  static __m256i greater(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
  static __m256i first(int64_t n) {
    const int count = static_cast<int>(n > 8 ? 8 : n);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m256 power_of(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 23)), _mm256_set1_ps(kFp8PowerUnit));
  }
  template <int Shift>
  static __m256 fp8(__m256i numbers) {
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_slli_epi32(numbers, Shift), _mm256_set1_epi32(INT32_MIN | 127 << 20)));
  }
  static __m256i dwords(const Fp8* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static __m256i words(const Fp8* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // The first 2 n of 32, zeros for the others.
  struct FirstPairs {
    Fp8 bytes[32] = {};
    FirstPairs(const Fp8* p, int64_t n) {
      for (int64_t i = 0; i < 2 * n && i < 32; ++i) bytes[i] = p[i];
    }
  };
  static __m256i pairs(const Bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static __m256i first_pairs(const Bf16* p, int64_t n) {
    return _mm256_maskload_epi32(reinterpret_cast<const int*>(p), first(n));
  }
  static __m256 even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  static __m256 odd(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(INT32_MIN >> 15)));
  }
  static __m256 widen(const Bf16* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
  }
  static __m256 power(__m256 n) {
    const __m256i exponent = _mm256_cvtps_epi32(_mm256_max_ps(n, _mm256_set1_ps(-126)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
  }
};

struct Words {
  __m256i lo;
  __m256i hi;

  static Words load(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
  }
  static Words broadcast(const int8_t* p) {
    int32_t quad;
    __builtin_memcpy(&quad, p, sizeof quad);
    return {_mm256_set1_epi32(quad), _mm256_set1_epi32(quad)};
  }
  template <int High>
  Words nibbles() const {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(High ? _mm256_srli_epi32(lo, 4) : lo, mask),
            _mm256_and_si256(High ? _mm256_srli_epi32(hi, 4) : hi, mask)};
  }
  template <int Bits>
  Words with_high(Words high) const {
    const __m256i mask = _mm256_set1_epi8((1 << Bits) - 1);
    return {_mm256_or_si256(lo, _mm256_slli_epi32(_mm256_and_si256(high.lo, mask), 4)),
            _mm256_or_si256(hi, _mm256_slli_epi32(_mm256_and_si256(high.hi, mask), 4))};
  }
  template <int Bits>
  Words shifted() const {
    return {_mm256_srli_epi32(lo, Bits), _mm256_srli_epi32(hi, Bits)};
  }
  template <int J>
  F16 byte() const {
    const __m256i mask = _mm256_set1_epi32(255);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(lo, 8 * J), mask)),
            _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(hi, 8 * J), mask))};
  }
  template <int J>
  F16 signed_byte() const {
    return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(lo, 24 - 8 * J), 24)),
            _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(hi, 24 - 8 * J), 24))};
  }
  template <int J, int Offset>
  F16 nibble() const {
    const F16 number = byte<J>();
    return Offset == 0 ? number : number - F16::broadcast(Offset);
  }
};

// AVX2 multiplies unsigned by signed bytes and adds neighbours in 16 bits, saturating. Numbers below 16 are small
// enough to add a whole group in 16 bits (8 quads * 2 * 15 * 127 < 2^15); signed ones give their sign to x first.
template <int Greatest, bool Signed>
struct Dot {
  static constexpr int32_t kOffset = 0;
  static constexpr bool kNarrow = Greatest < 16;
  __m256i lo;  // 32-bit sums, or pairs of 16-bit ones if narrow
  __m256i hi;

  static Dot zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  void add(Words numbers, Words quad) {
    lo = plus(lo, numbers.lo, quad.lo);
    hi = plus(hi, numbers.hi, quad.hi);
  }
  F16 minus(int32_t correction) const {
    const __m256i less = _mm256_set1_epi32(correction);
    return {_mm256_cvtepi32_ps(_mm256_sub_epi32(wide(lo), less)), _mm256_cvtepi32_ps(_mm256_sub_epi32(wide(hi), less))};
  }

 private:
  static __m256i plus(__m256i sums, __m256i numbers, __m256i quad) {
    const __m256i products = Signed ? _mm256_maddubs_epi16(_mm256_abs_epi8(numbers), _mm256_sign_epi8(quad, numbers))
                                    : _mm256_maddubs_epi16(numbers, quad);
    if constexpr (kNarrow) return _mm256_add_epi16(sums, products);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
  }
  static __m256i wide(__m256i sums) { return kNarrow ? _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) : sums; }
};

}  // namespace twinplane::kernels::avx2
