// Weights in blocks: GGUF's formats, and how a packed panel holds their numbers.
//
// A panel of C columns keeps, for each block of the format, side by side for all columns:
//
//   half d[C]  half m[C]                       Format::halves of them
//   per group of 32 weights:
//     int8 scale[C] ...                        Format::scales of them (K-quants; 6 or 8 bits in GGUF, a byte here)
//     uint32 word[C] ...                       Format::words of them
//
// Words hold numbers in quads, four consecutive k in the four bytes of a lane, as the integer dot products of all
// processors want them. Quad t (0 .. 7) of a group has k = 4 t + byte:
//
//   8 bits      word t
//   4 bits      word t / 2, low half of each byte if t is even, else the high one
//   fifth bit   word 4, bit t of each byte
//   two more    word 4 + t / 4, bits 2 (t % 4) and the next of each byte
//
// What a number q stands for:
//
//   Q8_0  d q (signed)      Q4_0  d (q - 8)      Q5_0  d (q - 16)      Q4_1, Q5_1  d q + m
//   Q4_K, Q5_K  (d scale[0]) q - m scale[1]      Q6_K  (d scale[k / 16]) (q - 32)
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/kernels.hpp"

namespace twinplane::kernels {

struct Format {
  int64_t block;        // weights per block; a multiple of kGroup
  int64_t block_bytes;  // of a block in a GGUF file
  int64_t halves;
  int64_t scales;
  int64_t words;  // as many as a number has bits
  int offset;     // what is subtracted from a number
  bool minimum;   // a constant is added to every weight of a group
  int parts;      // runs of weights of one group with a scale of their own

  constexpr int64_t groups() const { return block / kGroup; }
  constexpr int64_t head_bytes(int64_t columns) const { return 2 * halves * columns; }
  constexpr int64_t group_bytes(int64_t columns) const { return (scales + 4 * words) * columns; }
  constexpr int64_t packed_bytes(int64_t columns) const {
    return head_bytes(columns) + groups() * group_bytes(columns);
  }
};

// Internal (static), like half.hpp: each translation unit keeps the copy for its own instruction set.
static constexpr Format format_of(WeightKind kind) {
  switch (kind) {
    case WeightKind::kQ8_0:
      return {32, 34, 1, 0, 8, 0, false, 1};
    case WeightKind::kQ4_0:
      return {32, 18, 1, 0, 4, 8, false, 1};
    case WeightKind::kQ4_1:
      return {32, 20, 2, 0, 4, 0, true, 1};
    case WeightKind::kQ5_0:
      return {32, 22, 1, 0, 5, 16, false, 1};
    case WeightKind::kQ5_1:
      return {32, 24, 2, 0, 5, 0, true, 1};
    case WeightKind::kQ4_K:
      return {256, 144, 2, 2, 4, 0, true, 1};
    case WeightKind::kQ5_K:
      return {256, 176, 2, 2, 5, 0, true, 1};
    case WeightKind::kQ6_K:
      return {256, 210, 1, 2, 6, 32, false, 2};
    case WeightKind::kFloat32:
    case WeightKind::kBfloat16:
      break;
  }
  return {};
}

static constexpr bool is_quantized(WeightKind kind) {
  return kind != WeightKind::kFloat32 && kind != WeightKind::kBfloat16;
}

}  // namespace twinplane::kernels
