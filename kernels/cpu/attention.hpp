// Paged attention over a batch, and what goes into its cache.
#pragma once

#include <cstdint>

#include "kernels/cpu/kernels.hpp"
#include "kernels/cpu/linear.hpp"
#include "kernels/cpu/pool.hpp"

namespace twinplane::kernels {

// K and V of one layer: [N][G] of what KvType draws; blocks lie *_block_stride elements apart.
struct KvCache {
  void* keys;
  void* values;
  KvType type;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t head_dim;
  int64_t value_dim;
  int64_t key_block_stride;
  int64_t value_block_stride;

  int64_t powers() const { return type == KvType::kFp8 ? 1 : 0; }  // per head of a token
  int64_t key_tile_elements() const { return (head_dim + powers()) * 16; }
  int64_t key_head_elements() const { return (head_dim + powers()) * block_size; }
  int64_t value_head_elements() const { return (value_dim + powers()) * block_size; }
  // Of token `offset` of a block, its first value.
  int64_t first_value(int64_t offset) const {
    return type == KvType::kFloat32 ? offset * value_dim : offset / 2 * 2 * value_dim + offset % 2;
  }
  int64_t element_bytes() const {
    return type == KvType::kFloat32 ? sizeof(float) : type == KvType::kBfloat16 ? sizeof(Bf16) : sizeof(Fp8);
  }
};

// Heads of T tokens: [T][heads][dim], tokens `stride` floats apart.
struct Heads {
  const float* data;
  int64_t stride;
};

struct AttentionBatch {
  Heads query;  // [T][num_heads][head_dim]
  int64_t num_heads;
  int64_t num_sequences;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* rows;          // line of block_tables of each sequence; null: its own number
  const int32_t* context_lens;  // [num_sequences]
  const int32_t* query_start;   // [num_sequences + 1]
  float scale;
  int64_t window;
  float softcap;
  const float* sinks;  // [num_heads] or null

  const int32_t* table(int64_t sequence) const {
    return block_tables + (rows == nullptr ? sequence : rows[sequence]) * table_stride;
  }
};

// out [T][num_heads][value_dim], tokens out.stride apart.
void paged_attention(Pool& pool, const AttentionBatch& batch, const KvCache& cache, MutableRows out);

// Token t's key and value go to slot slots[t] = block * block_size + offset.
void write_kv(Pool& pool, int64_t tokens, Heads key, Heads value, const KvCache& cache, const int64_t* slots);

struct Rotation {
  const float* cos;  // [..][half], rows cos_stride apart
  int64_t cos_stride;
  const float* sin;
  int64_t sin_stride;
  int64_t half;
  const int64_t* rows = nullptr;  // of each token; null: its own number

  const float* cos_of(int64_t token) const { return cos + (rows == nullptr ? token : rows[token]) * cos_stride; }
  const float* sin_of(int64_t token) const { return sin + (rows == nullptr ? token : rows[token]) * sin_stride; }
};

struct HeadNorms {
  const float* query;  // [head_dim] or null
  const float* key;    // [head_dim] or null
  float eps;
};

// qkv [T][(num_heads + 2 G) head_dim]: query heads to q_out (contiguous [T][num_heads][head_dim]), keys and values to
// the cache.
void rope_write_kv(Pool& pool, const Rows& qkv, int64_t num_heads, const Rotation& rotation, const HeadNorms& norms,
                   const KvCache& cache, const int64_t* slots, float* q_out);

}  // namespace twinplane::kernels
