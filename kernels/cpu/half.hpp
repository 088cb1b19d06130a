// Conversions between float, IEEE binary16, bfloat16 and FP8, round to nearest even. Inline and internal (static): each
// translation unit keeps its own copy, compiled for its own instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/kernels.hpp"

namespace twinplane::kernels {

static inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

static inline Bf16 float_to_bf16(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};  // NaN stays NaN
  return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

static inline float bf16_to_float(Bf16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

static inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u;
  const uint32_t mantissa = half & 1023u;
  if (exponent == 31) return bits_float(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;
  return bits_float(sign | float_bits(subnormal));
}

static inline uint16_t float_to_half(float x) {
  const uint32_t bits = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | 0x7E00u;   // NaN
  if (magnitude >= 0x477FF000u) return sign | 0x7C00u;  // 65520 and more: infinity
  if (magnitude < 0x38800000u) {                        // below 2^-14: adding 0.5 leaves units of 2^-24 in the low bits
    return sign | static_cast<uint16_t>(float_bits(bits_float(magnitude) + 0.5f) - 0x3F000000u);
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - (112u << 23)) >> 13);
}

// E4M3 of the Open Compute Project's 8-bit formats (arXiv 2209.05433): 4 bits of exponent, 3 of mantissa, no infinity.
// For magnitudes up to 448, the greatest. Below 2^-6, the least that has an exponent of its own, come 0 and 2^-6 only.
static inline Fp8 float_to_fp8(float x) {
  const uint32_t bits = float_bits(x);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude < 0x3C800000u) return {static_cast<uint8_t>(sign | (magnitude > 0x3C000000u ? 8u : 0u))};
  const uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
  return {static_cast<uint8_t>(sign | ((rounded - (120u << 23)) >> 20))};
}

// The float of the same digits, which is 2^120 times smaller.
static inline float fp8_digits(Fp8 x) { return bits_float((x.bits & 0x80u) << 24 | (x.bits & 0x7Fu) << 20); }

}  // namespace twinplane::kernels
