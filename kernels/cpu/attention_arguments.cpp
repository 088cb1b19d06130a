#include "kernels/cpu/attention_arguments.hpp"

#include <algorithm>
#include <string>

namespace nb = nanobind;

namespace twinplane::kernels {
namespace {

// FP8: a cache of bytes, whose shapes count the powers.
KvCache fp8_cache_of(const Array& keys, const Array& values) {
  keys.shaped({kAny, kAny, kAny, kAny, 16}, "[N, G, B / 16, D + 1, 16]").contiguous_last(4).writable();
  const int64_t block_size = keys.size(2) * 16;
  values.of({Dtype::kUint8})
      .shaped({keys.size(0), keys.size(1), kAny}, "[N, G, B (Dv + 1)]")
      .contiguous_last(2)
      .writable();
  if (keys.size(3) < 2) keys.fail("has no room for a head dim beside the powers");
  if (block_size == 0 || values.size(2) % block_size != 0 || values.size(2) < 2 * block_size) {
    values.fail("has heads of " + number(values.size(2)) + " bytes; blocks of " + number(block_size) +
                " tokens take B (Dv + 1)");
  }
  return {.keys = keys.data<void>(),
          .values = values.data<void>(),
          .type = KvType::kFp8,
          .num_blocks = keys.size(0),
          .num_kv_heads = keys.size(1),
          .block_size = block_size,
          .head_dim = keys.size(3) - 1,
          .value_dim = values.size(2) / block_size - 1,
          .key_block_stride = keys.stride(0),
          .value_block_stride = values.stride(0)};
}

}  // namespace

KvCache cache_of(const Array& keys, const Array& values) {
  if (keys.dtype() == Dtype::kUint8) return fp8_cache_of(keys, values);
  keys.of({kF32, Dtype::kBf16})
      .shaped({kAny, kAny, kAny, kAny, 16}, "[N, G, B / 16, D, 16]")
      .contiguous_last(4)
      .writable();
  const int64_t block_size = keys.size(2) * 16;
  values.of({keys.dtype()})
      .shaped({keys.size(0), keys.size(1), block_size, kAny}, "[N, G, B, Dv]")
      .contiguous_last(3)
      .writable();
  return {.keys = keys.data<void>(),
          .values = values.data<void>(),
          .type = keys.dtype() == Dtype::kBf16 ? KvType::kBfloat16 : KvType::kFloat32,
          .num_blocks = keys.size(0),
          .num_kv_heads = keys.size(1),
          .block_size = block_size,
          .head_dim = keys.size(3),
          .value_dim = values.size(3),
          .key_block_stride = keys.stride(0),
          .value_block_stride = values.stride(0)};
}

KvCache projected_cache_of(const Array& keys, const Array& values, int64_t num_heads, int64_t num_kv_heads) {
  const KvCache cache = cache_of(keys, values);
  if (cache.num_kv_heads != num_kv_heads)
    keys.fail("has " + number(cache.num_kv_heads) + " heads, num_kv_heads is " + number(num_kv_heads));
  if (cache.value_dim != cache.head_dim) {
    values.fail("has head dim " + number(cache.value_dim) + " but keys have " + number(cache.head_dim) +
                "; a fused projection needs one");
  }
  if (num_heads < 1) throw nb::value_error(("num_heads must be at least 1, got " + number(num_heads)).c_str());
  return cache;
}

const int64_t* slots_of(const Array& slots, int64_t tokens, const KvCache& cache) {
  slots.of({Dtype::kInt64}).shaped({tokens}, "[T]").contiguous();
  const int64_t* data = slots.data<const int64_t>();
  const int64_t limit = cache.num_blocks * cache.block_size;
  for (int64_t t = 0; t < tokens; ++t) {
    if (data[t] < 0 || data[t] >= limit) {
      slots.fail("[" + number(t) + "] is " + number(data[t]) + "; " + number(cache.num_blocks) + " blocks of " +
                 number(cache.block_size) + " tokens have slots 0 to " + number(limit - 1));
    }
  }
  return data;
}

Heads heads_of(const Array& x, int64_t tokens, int64_t heads, int64_t dim, const char* letters) {
  x.of({kF32}).shaped({tokens, heads, dim}, letters).contiguous_last(2);
  return {x.data<const float>(), x.stride(0)};
}

Rotation rotation_of(const Array& cos, const Array& sin, int64_t tokens, int64_t head_dim) {
  cos.of({kF32}).shaped({tokens, kAny}, "[T, R / 2]").contiguous_last(1);
  const int64_t half = cos.size(1);
  sin.of({kF32}).shaped({cos.size(0), half}, "[T, R / 2]").contiguous_last(1);
  if (2 * half > head_dim) cos.fail("rotates " + number(2 * half) + " dims of heads that have " + number(head_dim));
  return {cos.data<const float>(), cos.stride(0), sin.data<const float>(), sin.stride(0), half};
}

Rotation rotation_at(const Array& cos, const Array& sin, const Array& positions, int64_t tokens, int64_t head_dim) {
  Rotation rotation = rotation_of(cos, sin, kAny, head_dim);
  positions.of({Dtype::kInt64}).shaped({tokens}, "[T]").contiguous();
  rotation.rows = positions.data<const int64_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    if (rotation.rows[t] < 0 || rotation.rows[t] >= cos.size(0)) {
      positions.fail("[" + number(t) + "] is " + number(rotation.rows[t]) + "; cos has " + number(cos.size(0)) +
                     " rows");
    }
  }
  return rotation;
}

const int32_t* int32_vector(const Array& x, int64_t length, const char* letters) {
  return x.of({Dtype::kInt32}).shaped({length}, letters).contiguous().data<const int32_t>();
}

void check_sequences(const AttentionBatch& batch, const KvCache& cache, int64_t tokens, const Array& tables,
                     const Array& contexts, const Array& starts, const std::optional<Array>& rows) {
  // The kernels find the greatest score before they scale.
  if (!(batch.scale > 0)) throw nb::value_error(("scale is " + std::to_string(batch.scale) + ", not positive").c_str());
  if (batch.query_start[0] != 0 || batch.query_start[batch.num_sequences] > tokens) {
    starts.fail("must begin with 0 and end with at most the " + number(tokens) + " tokens of query, got " +
                number(batch.query_start[0]) + " and " + number(batch.query_start[batch.num_sequences]));
  }
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int64_t queries = static_cast<int64_t>(batch.query_start[s + 1]) - batch.query_start[s];
    const int64_t context = batch.context_lens[s];
    if (queries < 0) starts.fail("decreases at sequence " + number(s));
    if (context < queries) {
      contexts.fail("[" + number(s) + "] is " + number(context) + ", less than the sequence's " + number(queries) +
                    " query tokens");
    }
    if (rows && (batch.rows[s] < 0 || batch.rows[s] >= tables.size(0))) {
      rows->fail("[" + number(s) + "] is " + number(batch.rows[s]) + "; block_tables has " + number(tables.size(0)) +
                 " lines");
    }
    const int64_t blocks = (context + cache.block_size - 1) / cache.block_size;
    if (blocks > tables.size(1)) {
      tables.fail("has " + number(tables.size(1)) + " columns; sequence " + number(s) + " of " + number(context) +
                  " tokens needs " + number(blocks));
    }
    // A sliding window lets the blocks before it go; their entries mean nothing.
    const int64_t oldest = batch.window > 0 ? std::max<int64_t>(0, context - queries - batch.window + 1) : 0;
    for (int64_t i = queries > 0 ? oldest / cache.block_size : blocks; i < blocks; ++i) {
      const int32_t block = batch.table(s)[i];
      if (block < 0 || block >= cache.num_blocks) {
        tables.fail("names block " + number(block) + " for tokens " + number(i * cache.block_size) +
                    " ff. of sequence " + number(s) + "; the cache has " + number(cache.num_blocks));
      }
    }
  }
}

}  // namespace twinplane::kernels
