#include "kernels/cpu/blocks.hpp"

#include <cstring>

#include "kernels/cpu/formats.hpp"
#include "kernels/cpu/half.hpp"

namespace twinplane::kernels {
namespace {

// ---- GGUF's side (ggml's block_q8_0 ... block_q6_K)

// Number k (0 .. 31) of group g of a block, as stored. Blocks of 32 with fewer bits than 8 hold k and k + 16 in the
// halves of one byte; K-quants hold number k of two groups in them.
uint8_t stored_number(const uint8_t* block, WeightKind kind, int64_t g, int64_t k) {
  const auto half = [](uint8_t byte, bool high) { return static_cast<uint8_t>(high ? byte >> 4 : byte & 15); };
  switch (kind) {
    case WeightKind::kQ8_0:
      return block[2 + k];
    case WeightKind::kQ4_0:
      return half(block[2 + k % 16], k >= 16);
    case WeightKind::kQ4_1:
      return half(block[4 + k % 16], k >= 16);
    case WeightKind::kQ5_0:
    case WeightKind::kQ5_1: {  // d, m of Q5_1, fifth bits, numbers
      const uint8_t* fifth = block + (kind == WeightKind::kQ5_0 ? 2 : 4);
      return static_cast<uint8_t>(half(fifth[4 + k % 16], k >= 16) | (fifth[k / 8] >> k % 8 & 1) << 4);
    }
    case WeightKind::kQ4_K:  // d, dmin, 12 bytes of scales, numbers
      return half(block[16 + g / 2 * 32 + k], g % 2 == 1);
    case WeightKind::kQ5_K:  // d, dmin, 12 bytes of scales, fifth bits, numbers
      return static_cast<uint8_t>(half(block[48 + g / 2 * 32 + k], g % 2 == 1) | (block[16 + k] >> g & 1) << 4);
    default: {  // Q6_K: low halves, upper two bits, 16 scales, d
      const int64_t quarter = g % 4;
      const uint8_t low = half(block[g / 4 * 64 + quarter % 2 * 32 + k], quarter >= 2);
      return static_cast<uint8_t>(low | (block[128 + g / 4 * 32 + k] >> 2 * quarter & 3) << 4);
    }
  }
}

// The two one-byte scales of group g: scale and minimum (Q4_K, Q5_K: 6 bits each, packed), or the scales of its halves.
void stored_scales(const uint8_t* block, WeightKind kind, int64_t g, uint8_t (&out)[2]) {
  if (kind == WeightKind::kQ6_K) {
    std::memcpy(out, block + 192 + 2 * g, 2);
    return;
  }
  const uint8_t* packed = block + 4;
  if (g < 4) {
    out[0] = packed[g] & 63;
    out[1] = packed[g + 4] & 63;
  } else {
    out[0] = static_cast<uint8_t>((packed[g + 4] & 15) | packed[g - 4] >> 6 << 4);
    out[1] = static_cast<uint8_t>(packed[g + 4] >> 4 | packed[g] >> 6 << 4);
  }
}

const uint8_t* stored_halves(const uint8_t* block, WeightKind kind) {
  return kind == WeightKind::kQ6_K ? block + 208 : block;
}

// ---- the packed side

uint32_t load_word(const uint8_t* words, int64_t word, int64_t c, int64_t columns) {
  uint32_t value;
  std::memcpy(&value, words + 4 * (word * columns + c), sizeof value);
  return value;
}

void add_bits(uint8_t* words, int64_t word, int64_t c, int64_t columns, uint32_t bits) {
  const uint32_t value = load_word(words, word, c, columns) | bits;
  std::memcpy(words + 4 * (word * columns + c), &value, sizeof value);
}

void store_number(uint8_t* words, WeightKind kind, int64_t k, int64_t c, int64_t columns, uint8_t number) {
  const int64_t t = k / 4;
  const int64_t byte = 8 * (k % 4);
  if (kind == WeightKind::kQ8_0) return add_bits(words, t, c, columns, static_cast<uint32_t>(number) << byte);
  add_bits(words, t / 2, c, columns, (number & 15u) << (byte + 4 * (t % 2)));
  const uint32_t high = number >> 4;
  const int64_t bits = format_of(kind).words;
  if (bits == 5) add_bits(words, 4, c, columns, high << (byte + t));
  if (bits == 6) add_bits(words, 4 + t / 4, c, columns, high << (byte + 2 * (t % 4)));
}

int load_number(const uint8_t* words, WeightKind kind, int64_t k, int64_t c, int64_t columns) {
  const int64_t t = k / 4;
  const int64_t byte = 8 * (k % 4);
  if (kind == WeightKind::kQ8_0) return static_cast<int8_t>(load_word(words, t, c, columns) >> byte);
  int number = load_word(words, t / 2, c, columns) >> (byte + 4 * (t % 2)) & 15;
  const int64_t bits = format_of(kind).words;
  if (bits == 5) number |= (load_word(words, 4, c, columns) >> (byte + t) & 1) << 4;
  if (bits == 6) number |= (load_word(words, 4 + t / 4, c, columns) >> (byte + 2 * (t % 4)) & 3) << 4;
  return number;
}

struct PackedGroup {
  uint8_t* halves;
  uint8_t* scales;
  uint8_t* words;
};

PackedGroup packed_group(uint8_t* panel, const Format& format, int64_t group, int64_t columns) {
  uint8_t* block = panel + group / format.groups() * format.packed_bytes(columns);
  uint8_t* scales = block + format.head_bytes(columns) + group % format.groups() * format.group_bytes(columns);
  return {block, scales, scales + format.scales * columns};
}

float load_half(const uint8_t* halves, int64_t index) {
  uint16_t bits;
  std::memcpy(&bits, halves + 2 * index, sizeof bits);
  return half_to_float(bits);
}

}  // namespace

size_t gguf_block_bytes(WeightKind kind) { return static_cast<size_t>(format_of(kind).block_bytes); }
int64_t gguf_block_weights(WeightKind kind) { return format_of(kind).block; }

size_t bytes_of_panel(WeightKind kind, int64_t columns, int64_t in) {
  if (kind == WeightKind::kFloat32) return static_cast<size_t>(columns * in) * sizeof(float);
  if (kind == WeightKind::kBfloat16) return static_cast<size_t>(columns * in) * sizeof(Bf16);
  const Format format = format_of(kind);
  return static_cast<size_t>(in / format.block * format.packed_bytes(columns));
}

void pack_block(const uint8_t* block, WeightKind kind, uint8_t* panel, int64_t index, int64_t c, int64_t columns) {
  const Format format = format_of(kind);
  for (int64_t g = 0; g < format.groups(); ++g) {
    const PackedGroup to = packed_group(panel, format, index * format.groups() + g, columns);
    if (g == 0) {
      for (int64_t h = 0; h < format.halves; ++h)
        std::memcpy(to.halves + 2 * (h * columns + c), stored_halves(block, kind) + 2 * h, 2);
    }
    if (format.scales > 0) {
      uint8_t scales[2];
      stored_scales(block, kind, g, scales);
      for (int64_t s = 0; s < 2; ++s) to.scales[s * columns + c] = scales[s];
    }
    for (int64_t k = 0; k < kGroup; ++k) store_number(to.words, kind, k, c, columns, stored_number(block, kind, g, k));
  }
}

float unpack_value(const uint8_t* panel, WeightKind kind, int64_t c, int64_t k, int64_t columns) {
  const Format format = format_of(kind);
  // Nothing is written through it.
  const PackedGroup from = packed_group(const_cast<uint8_t*>(panel), format, k / kGroup, columns);
  const auto small = [&](int64_t s) { return static_cast<float>(static_cast<int8_t>(from.scales[s * columns + c])); };
  const int64_t part = k % kGroup * format.parts / kGroup;
  const float scale = load_half(from.halves, c) * (format.scales > 0 ? small(part) : 1);
  const int number = load_number(from.words, kind, k % kGroup, c, columns) - format.offset;
  const float value = static_cast<float>(number) * scale;
  if (!format.minimum) return value;
  const float minimum = load_half(from.halves, columns + c);
  return value + (format.scales > 0 ? -(minimum * small(1)) : minimum);
}

}  // namespace twinplane::kernels
