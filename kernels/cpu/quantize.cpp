// GGUF's reference quantizers, in float arithmetic as there.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/half.hpp"
#include "kernels/cpu/linear.hpp"

namespace twinplane::kernels {
namespace {

void store_half(float x, uint8_t* out) {
  const uint16_t bits = float_to_half(x);
  std::memcpy(out, &bits, sizeof bits);
}

float inverse(float x) { return x == 0 ? 0 : 1 / x; }

// d = greatest magnitude / 127; numbers round half away from zero.
void quantize_q8_0(const float* x, uint8_t* block) {
  float greatest = 0;
  for (int i = 0; i < kGroup; ++i) greatest = std::max(greatest, std::fabs(x[i]));
  const float scale = greatest / 127;
  store_half(scale, block);
  for (int i = 0; i < kGroup; ++i) {
    block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::round(x[i] * inverse(scale))));
  }
}

// number i -> low half of byte i % 16 if i < 16, else the high half
void store_nibbles(const uint8_t (&numbers)[kGroup], uint8_t* bytes) {
  for (int i = 0; i < kGroup / 2; ++i) bytes[i] = static_cast<uint8_t>(numbers[i] | numbers[i + kGroup / 2] << 4);
}

uint8_t to_nibble(float x) { return static_cast<uint8_t>(std::clamp(static_cast<int>(x), 0, 15)); }

// d = (signed value of greatest magnitude) / -8, so that value is the number 0 exactly.
void quantize_q4_0(const float* x, uint8_t* block) {
  float extreme = 0;
  for (int i = 0; i < kGroup; ++i) {
    if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
  }
  const float scale = extreme / -8;
  store_half(scale, block);
  uint8_t numbers[kGroup];
  for (int i = 0; i < kGroup; ++i) numbers[i] = to_nibble(x[i] * inverse(scale) + 8.5f);
  store_nibbles(numbers, block + 2);
}

void quantize_q4_1(const float* x, uint8_t* block) {
  const auto [low, high] = std::minmax_element(x, x + kGroup);
  const float scale = (*high - *low) / 15;
  store_half(scale, block);
  store_half(*low, block + 2);
  uint8_t numbers[kGroup];
  for (int i = 0; i < kGroup; ++i) numbers[i] = to_nibble((x[i] - *low) * inverse(scale) + 0.5f);
  store_nibbles(numbers, block + 4);
}

}  // namespace

void quantize_gguf(const float* values, int64_t groups, WeightKind kind, uint8_t* blocks) {
  for (int64_t g = 0; g < groups; ++g, values += kGroup, blocks += gguf_block_bytes(kind)) {
    switch (kind) {
      case WeightKind::kQ8_0:
        quantize_q8_0(values, blocks);
        break;
      case WeightKind::kQ4_0:
        quantize_q4_0(values, blocks);
        break;
      default:
        quantize_q4_1(values, blocks);
    }
  }
}

}  // namespace twinplane::kernels
