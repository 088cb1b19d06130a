// What one instruction set offers. Every function here is compiled once per instruction set from the same templates
// (linear.inl, attention.inl, elementwise.inl over the 16-lane vector of simd_*.hpp); the rest of the module calls it
// through this table.
//
// Bit-stability (INV-10) is decided here: each function computes a row from that row alone, in an order that depends on
// nothing but the row's own shape.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twinplane::kernels {

inline constexpr int64_t kLanes = 16;        // of the vector the kernels are written in, on any processor
inline constexpr int64_t kGroup = 32;        // weights per group of the quantized formats (formats.hpp)
inline constexpr int64_t kTileRows = 16;     // rows of x that are quantized together
inline constexpr int64_t kPanelRows = 288;   // rows of x that one panel product takes at most (a multiple of kTileRows)
inline constexpr int64_t kDepthBlock = 256;  // K is walked in steps of this (a multiple of kGroup)
inline constexpr int64_t kMaxPanelColumns = 32;
inline constexpr int64_t kAttentionSplit = 256;  // keys per partition of the softmax
inline constexpr int64_t kAttentionRows = 48;    // (query, head) pairs per attention tile

struct Bf16 {
  uint16_t bits;
};
struct Fp8 {
  uint8_t bits;
};

enum class WeightKind : uint8_t { kFloat32, kBfloat16, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K };
enum class Activation : uint8_t { kNone, kRelu, kSilu, kGelu, kGeluTanh };

// Each 32 values of a row of x as int8: x[k] is about scale * numbers[k], off by at most scale / 2. The same 32 k of
// kTileRows rows lie together, as tile loads (isa_amx.cpp) want them: whole cache lines, in one direction. Rows that x
// does not have scale by 0 and are otherwise undefined.
struct alignas(64) ActivationTile {
  struct Row {
    float scale;         // greatest magnitude / 127; NaN if a value was not finite
    float weighted_sum;  // scale * sum of the numbers
    int32_t sums[2];     // of numbers 0 .. 15 and 16 .. 31
  };
  int8_t numbers[kTileRows][kGroup];
  Row rows[kTileRows];
};

// Each 32 values of a row of x as three bfloat16 numbers, the greatest first, each of which holds the next 8 bits of
// the significand: their sum is x[k] (but for what is below 2^-126). So the matrix unit multiplies floats
// (isa_amx.cpp). The same 32 k of kTileRows rows lie together; k that x does not have are zeros, rows are undefined.
inline constexpr int kPieces = 3;
struct alignas(64) SplitTile {
  uint16_t pieces[kPieces][kTileRows][kGroup];
};

// acc[r][c] = sum over k of x[r][k] * W[c][k], for the `panel_columns` columns of one packed panel. How it is summed
// does not depend on `rows`: it is one chain of multiply-adds in ascending k (cutting K into steps only parks the chain
// in memory between them), or of 32 k each where x is split (isa_amx.cpp).
struct PanelProduct {
  const void* panel;  // packed weights, see linear.hpp
  const void* next;   // the panel that this thread will probably be given next, to be asked for ahead; or this one
  WeightKind kind;
  int64_t depth;  // K
  const float* x;
  int64_t x_stride;
  const SplitTile* split;  // for panels in pairs (dense.inl): x as [ceil(rows / kTileRows)][ceil(K / kGroup)]
  int64_t rows;            // 1 .. kPanelRows
  float* acc;              // [rows, panel_columns], contiguous, with room for whole tiles of rows
  float* unpacked;         // scratch of kDepthBlock * panel_columns floats
};

// The same product for quantized weights, with x quantized too. Within a group (a part of it, where parts have scales
// of their own) the sum is one of integers, exact; the parts' sums enter acc scaled, in ascending order of k.
struct IntegerProduct {
  const void* panel;
  const void* next;  // as above
  WeightKind kind;
  int64_t depth;
  const ActivationTile* x;  // [ceil(rows / kTileRows)][depth / kGroup]
  int64_t rows;
  float* acc;  // as above, with room for whole tiles of rows
};

// out = activation(acc + bias) + residual, for the first `columns` columns.
struct LinearEpilogue {
  const float* acc;
  int64_t rows;
  int64_t columns;
  const float* bias;      // or null
  const float* residual;  // or null; may be `out`
  int64_t residual_stride;
  float* out;
  int64_t out_stride;
  Activation activation;
};

// out = activation(gate + gate_bias) * (up + up_bias).
struct GatedEpilogue {
  const float* gate;
  const float* up;
  int64_t acc_stride;
  int64_t rows;
  int64_t columns;
  const float* gate_bias;  // or null
  const float* up_bias;    // or null
  float* out;
  int64_t out_stride;
  Activation activation;
};

// How keys and values are cached. FP8: each head of a token as E4M3 numbers times a power of two of its own, a byte
// beside them (E8M0: 2^(byte - 127); 255 and zeros if a value was not finite). The power is the smallest that leaves no
// number above 448, and of numbers below 2^-6 there are 0 and 2^-6 only, so that one is off by at most 1/16 of itself
// or 2^-14 of the head's greatest. A token's bytes depend on that token alone.
//
//   float32    keys [B / 16][D][16]                                          values [B][Dv]
//   bfloat16   keys [B / 16] { [D / 2][16][2], [D % 2][16] }                 values [B / 2][Dv][2]
//   FP8        keys [B / 16] { [D / 2][16][2], [D % 2][16], powers [16] }    values { [B / 2][Dv][2], powers [B] }
//
// What a product runs over, dims of keys and tokens of values, lies in pairs, as the matrix unit wants it
// (attention_amx.inl) and other processors read it with the least work.
enum class KvType : uint8_t { kFloat32, kBfloat16, kFp8 };

// FP8 numbers are read as floats of the same digits, so 2^-120 of them, at the lower end of what a float can be. What
// they are multiplied with makes up for it: queries and powers are taken times these, and sums times the first again.
// With them queries, keys and values from 1e-12 to 1e16 meet nothing on the way that is too small or too great.
inline constexpr float kFp8Unit = 0x1p40f;
inline constexpr float kFp8PowerUnit = 0x1p80f;

// One tile of attention: some consecutive query tokens of one sequence times the query heads of one KV head.
// Row r of the tile is token r / heads, head r % heads.
struct AttentionTile {
  const float* query;    // first token, first head of the tile
  int64_t query_stride;  // between tokens
  int64_t tokens;
  int64_t heads;           // query heads per KV head; tokens * heads <= kAttentionRows
  int64_t first_position;  // of the first token
  const void* keys;        // of this KV head: + block * key_block_stride, then as KvType says
  const void* values;      //                  + block * value_block_stride
  KvType type;
  int64_t key_block_stride;  // elements
  int64_t value_block_stride;
  const int32_t* table;
  int64_t block_size;
  int64_t head_dim;
  int64_t value_dim;
  float scale;
  int64_t window;  // 0: all
  float softcap;   // 0: none
};

// Keys [index * kAttentionSplit, + kAttentionSplit) of a tile.
struct AttentionPartition {
  const AttentionTile* tile = nullptr;  // null: none
  int64_t index = 0;
};

// The softmax over some keys of one row, unnormalized: the greatest exponent, as a power of two, and the sum of
// exponentials relative to it; the weighted values lie beside it.
struct SoftmaxState {
  float max;
  float sum;  // 0: no key seen yet
};

struct RotaryHeads {
  float* x;  // [heads, head_dim], contiguous
  int64_t heads;
  int64_t head_dim;
  const float* norm;  // [head_dim] or null
  float eps;
  const float* cos;  // [half]
  const float* sin;
  int64_t half;
};

// The tokens of one row whose weight exp((logit - peak) * inverse_temperature) reaches `threshold` > 0.
struct Weighing {
  const float* logits;
  int64_t vocab;
  float peak;                 // the greatest logit
  float inverse_temperature;  // finite
  float threshold;
  float skip_below;  // no logit below this reaches it
  uint64_t* keys;    // [vocab]
};

// Of a weight and its token; in ascending order of keys weights descend, and equal ones come by id. (The bits of
// non-negative floats are ordered as their values.)
inline uint64_t weight_key(float weight, int64_t token) {
  return static_cast<uint64_t>(~__builtin_bit_cast(uint32_t, weight)) << 32 | static_cast<uint64_t>(token);
}
inline float key_weight(uint64_t key) { return __builtin_bit_cast(float, ~static_cast<uint32_t>(key >> 32)); }

struct Kernels {
  const char* name;
  int64_t panel_columns;
  int64_t strip_rows;  // rows one micro-kernel takes at most

  void (*panel_product)(const PanelProduct&);
  // Up to kTileRows rows of x. Null: all panels take x itself.
  void (*split_activations)(const float* x, int64_t x_stride, int64_t rows, int64_t depth, SplitTile* out);
  void (*integer_product)(const IntegerProduct&);
  void (*after_job)();  // on each thread of the pool, when it has no more tiles of a job; or null
  // Up to kTileRows rows of x, a multiple of kGroup long. Values below 1e-30 in magnitude count as zero.
  void (*quantize_activations)(const float* x, int64_t x_stride, int64_t rows, int64_t depth, ActivationTile* out);
  void (*linear_epilogue)(const LinearEpilogue&);
  void (*gated_epilogue)(const GatedEpilogue&);

  // Bytes of scratch for a tile.
  size_t (*attention_scratch)(int64_t head_dim, int64_t value_dim);
  // Before partitions of a tile, which find its queries in their scratch.
  void (*attention_query)(const AttentionTile&, void* scratch);
  // For every row: states[row], sums[row][value_dim]. `next`: what this thread will probably be given next, to be asked
  // for ahead.
  void (*attention_partition)(const AttentionPartition&, const AttentionPartition& next, SoftmaxState* states,
                              float* sums, void* scratch);
  // Adds partition `part` to `state`; rows without a key in the part are left as they are.
  void (*attention_merge)(SoftmaxState& state, float* sums, const SoftmaxState& part, const float* part_sums,
                          int64_t value_dim);
  // out = sums / (sum + exp(sink - max)); sink null: none.
  void (*attention_finish)(const SoftmaxState& state, const float* sums, const float* sink, float* out,
                           int64_t value_dim);

  void (*rms_norm)(const float* x, const float* weight, float eps, float* out, int64_t dim);
  void (*add_rms_norm)(const float* x, float* residual, const float* weight, float eps, float* out, int64_t dim);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, float* out, int64_t dim);
  void (*rotary)(const RotaryHeads&);
  void (*write_key)(const float* key, void* tile, int64_t lane, int64_t head_dim, KvType type);
  // `first`: where the first value goes. `power`: where the line's power goes (FP8).
  void (*write_value)(const float* value, void* first, uint8_t* power, int64_t value_dim, KvType type);
  float (*greatest_logit)(const float* logits, int64_t vocab);  // NaN if one is
  int64_t (*argmax)(const float* logits, int64_t vocab);
  // Writes the keys of those tokens, unsorted, and returns how many. `total`, unless null: the weight of all tokens.
  int64_t (*weigh)(const Weighing&, double* total);

  float (*sum)(const float* values, int64_t count);        // asks ahead as the products do; count a multiple of 64
  float (*sum_plain)(const float* values, int64_t count);  // leaves that to the processor
  int64_t (*fma_chain)(int64_t rounds, float* sink);  // independent multiply-adds in registers; returns how many FLOP
};

// The table in use. Chosen by the processor; select() overrides and returns false if the processor lacks it.
const Kernels& active();
bool select(const char* name);
bool supported(const char* name);
inline constexpr const char* kInstructionSets[] = {"amx", "avx512_bf16", "avx512", "avx2", "plain"};  // best first

}  // namespace twinplane::kernels
