// F16, a vector of 16 floats, in plain C++ for any processor. See simd_avx512.hpp for what the functions mean. Here a
// multiply-add rounds twice.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/half.hpp"
#include "kernels/cpu/kernels.hpp"

namespace twinplane::kernels::plain {

inline constexpr const char* kName = "plain";
inline constexpr int kPanelVectors = 1;
inline constexpr int kStripRows = 4;
inline constexpr int kUnpackRows = 2;
inline constexpr int kIntegerRows = 4;
inline constexpr int kRegisters = 8;  // of 16 floats, if there were any

struct F16 {
  float v[kLanes];

  template <class Function>
  static F16 each(const Function& function) {
    F16 out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = function(i);
    return out;
  }
  static F16 zero() { return broadcast(0); }
  static F16 broadcast(float x) {
    return each([&](int) { return x; });
  }
  static F16 load(const float* p) {
    return each([&](int i) { return p[i]; });
  }
  static F16 load(const Bf16* p) {
    return each([&](int i) { return widen(p[i]); });
  }
  static F16 load_even(const Bf16* p) {
    return each([&](int i) { return widen(p[2 * i]); });
  }
  static F16 load_odd(const Bf16* p) { return load_even(p + 1); }
  static F16 load_first_even(const Bf16* p, int64_t n) {
    return each([&](int i) { return i < n ? widen(p[2 * i]) : 0.0f; });
  }
  static F16 load_first_odd(const Bf16* p, int64_t n) { return load_first_even(p + 1, n); }
  static F16 load(const Fp8* p) {
    return each([&](int i) { return fp8_digits(p[i]); });
  }
  static F16 load_even(const Fp8* p) {
    return each([&](int i) { return fp8_digits(p[2 * i]); });
  }
  static F16 load_odd(const Fp8* p) { return load_even(p + 1); }
  static F16 load_first_even(const Fp8* p, int64_t n) {
    return each([&](int i) { return i < n ? fp8_digits(p[2 * i]) : 0.0f; });
  }
  static F16 load_first_odd(const Fp8* p, int64_t n) { return load_first_even(p + 1, n); }
  static F16 load_powers(const uint8_t* p) {
    return each([&](int i) { return bits_float(static_cast<uint32_t>(p[i]) << 23) * kFp8PowerUnit; });
  }
  static F16 load_first(const float* p, int64_t n) {
    return each([&](int i) { return i < n ? p[i] : 0.0f; });
  }
  static F16 load_half(const uint16_t* p) {
    return each([&](int i) { return half_to_float(p[i]); });
  }
  static F16 load_int8(const int8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
  }
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
  // Of integral values from -127 to 127. Returns their sum.
  int32_t store_int8(int8_t* p) const {
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += p[i] = static_cast<int8_t>(v[i]);
    return sum;
  }
  void store_first(float* p, int64_t n) const {
    if (n > 0) std::memcpy(p, v, static_cast<size_t>(n < kLanes ? n : kLanes) * sizeof(float));
  }

  F16 operator+(const F16& o) const {
    return each([&](int i) { return v[i] + o.v[i]; });
  }
  F16 operator-(const F16& o) const {
    return each([&](int i) { return v[i] - o.v[i]; });
  }
  F16 operator*(const F16& o) const {
    return each([&](int i) { return v[i] * o.v[i]; });
  }
  F16 operator/(const F16& o) const {
    return each([&](int i) { return v[i] / o.v[i]; });
  }
  F16 plus_product(const F16& a, const F16& b) const {
    return each([&](int i) { return a.v[i] * b.v[i] + v[i]; });
  }
  F16 max(const F16& o) const {
    return each([&](int i) { return v[i] > o.v[i] ? v[i] : o.v[i]; });
  }
  F16 min(const F16& o) const {
    return each([&](int i) { return v[i] < o.v[i] ? v[i] : o.v[i]; });
  }
  F16 round() const {
    return each([&](int i) { return nearbyintf(v[i]); });
  }
  F16 scale_by_power(const F16& n) const {
    return each([&](int i) {
      const float within = n.v[i] > -126 ? (n.v[i] < 127 ? n.v[i] : 127) : -126;  // of NaN, anything: v is NaN too
      const int32_t exponent = static_cast<int32_t>(within);
      const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
      float power;
      std::memcpy(&power, &bits, sizeof power);
      return v[i] * power;
    });
  }
  F16 keep(int64_t begin, int64_t end, const F16& fill) const {
    return each([&](int i) { return i >= begin && i < end ? v[i] : fill.v[i]; });
  }
  float sum() const {
    float total = 0;
    for (float x : v) total += x;
    return total;
  }
  float greatest() const {
    float found = v[0];
    for (float x : v) found = x > found ? x : found;
    return found;
  }
  static float greatest_magnitude(const F16& a, const F16& b) {
    uint32_t found = 0;
    for (int i = 0; i < 2 * kLanes; ++i) {
      const uint32_t bits = float_bits(i < kLanes ? a.v[i] : b.v[i - kLanes]) & 0x7FFFFFFFu;
      found = bits > found ? bits : found;
    }
    return bits_float(found);
  }
  bool has_nan() const {
    bool found = false;
    for (float x : v) found |= x != x;
    return found;
  }
  bool reaches(float least) const {
    bool found = false;
    for (float x : v) found |= x >= least;
    return found;
  }

 private:
  static float widen(Bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};

struct Words {
  uint8_t v[kLanes][4];

  template <class Function>
  static Words each(const Function& function) {
    Words out;
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < 4; ++j) out.v[i][j] = static_cast<uint8_t>(function(i, j));
    }
    return out;
  }
  static Words load(const uint8_t* p) {
    return each([&](int i, int j) { return p[4 * i + j]; });
  }
  static Words broadcast(const int8_t* p) {
    return each([&](int, int j) { return p[j]; });
  }
  template <int High>
  Words nibbles() const {
    return each([&](int i, int j) { return High ? v[i][j] >> 4 : v[i][j] & 15; });
  }
  template <int Bits>
  Words with_high(const Words& high) const {
    return each([&](int i, int j) { return v[i][j] | (high.v[i][j] & ((1 << Bits) - 1)) << 4; });
  }
  template <int Bits>
  Words shifted() const {
    return each([&](int i, int j) { return v[i][j] >> Bits; });
  }
  template <int J>
  F16 byte() const {
    return F16::each([&](int i) { return static_cast<float>(v[i][J]); });
  }
  template <int J>
  F16 signed_byte() const {
    return F16::each([&](int i) { return static_cast<float>(static_cast<int8_t>(v[i][J])); });
  }
  template <int J, int Offset>
  F16 nibble() const {
    return F16::each([&](int i) { return static_cast<float>(v[i][J] - Offset); });
  }
};

template <int Greatest, bool Signed>
struct Dot {
  static constexpr int32_t kOffset = 0;
  int32_t v[kLanes];

  static Dot zero() { return {}; }
  void add(const Words& numbers, const Words& quad) {
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < 4; ++j) {
        const int32_t number = Signed ? static_cast<int8_t>(numbers.v[i][j]) : numbers.v[i][j];
        v[i] += number * static_cast<int8_t>(quad.v[i][j]);
      }
    }
  }
  F16 minus(int32_t correction) const {
    return F16::each([&](int i) { return static_cast<float>(v[i] - correction); });
  }
};

}  // namespace twinplane::kernels::plain
