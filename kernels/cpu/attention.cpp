#include "kernels/cpu/attention.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace twinplane::kernels {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Fewer tiles than this per thread: partitions of one tile are computed by different threads.
constexpr int64_t kTilesPerThread = 4;

// Query tokens [first_token, + tokens) of one sequence, for the query heads [first_head, + heads) that share a KV head.
struct TileSpec {
  int64_t sequence;
  int64_t kv_head;
  int64_t first_head;
  int64_t heads;
  int64_t first_token;  // row of the batch's query
  int64_t tokens;
  int64_t first_position;
  int64_t first_partition;
  int64_t end_partition;
};

// Cuts the batch into tiles. More than kAttentionRows query heads on one KV head are cut too. Tiles that read the same
// keys follow each other, so that these stay in a cache.
std::vector<TileSpec> plan_tiles(const AttentionBatch& batch, const KvCache& cache) {
  const int64_t group = batch.num_heads / cache.num_kv_heads;
  const int64_t heads_per_tile = std::min(group, kAttentionRows);
  const int64_t tokens_per_tile = kAttentionRows / heads_per_tile;
  std::vector<TileSpec> tiles;
  for (int64_t s = 0; s < batch.num_sequences; ++s) {
    const int64_t begin = batch.query_start[s];
    const int64_t end = batch.query_start[s + 1];
    for (int64_t kv_head = 0; kv_head < cache.num_kv_heads; ++kv_head) {
      for (int64_t token = begin; token < end; token += tokens_per_tile) {
        const int64_t tokens = std::min(tokens_per_tile, end - token);
        const int64_t position = batch.context_lens[s] - (end - token);
        const int64_t oldest = batch.window > 0 ? std::max<int64_t>(0, position - batch.window + 1) : 0;
        for (int64_t head = 0; head < group; head += heads_per_tile) {
          tiles.push_back({.sequence = s,
                           .kv_head = kv_head,
                           .first_head = kv_head * group + head,
                           .heads = std::min(heads_per_tile, group - head),
                           .first_token = token,
                           .tokens = tokens,
                           .first_position = position,
                           .first_partition = oldest / kAttentionSplit,
                           .end_partition = (position + tokens - 1) / kAttentionSplit + 1});
        }
      }
    }
  }
  return tiles;
}

AttentionTile tile_of(const AttentionBatch& batch, const KvCache& cache, const TileSpec& spec) {
  const int64_t key_head = spec.kv_head * cache.key_head_elements() * cache.element_bytes();
  const int64_t value_head = spec.kv_head * cache.value_head_elements() * cache.element_bytes();
  return {.query = batch.query.data + spec.first_token * batch.query.stride + spec.first_head * cache.head_dim,
          .query_stride = batch.query.stride,
          .tokens = spec.tokens,
          .heads = spec.heads,
          .first_position = spec.first_position,
          .keys = static_cast<const char*>(cache.keys) + key_head,
          .values = static_cast<const char*>(cache.values) + value_head,
          .type = cache.type,
          .key_block_stride = cache.key_block_stride,
          .value_block_stride = cache.value_block_stride,
          .table = batch.table(spec.sequence),
          .block_size = cache.block_size,
          .head_dim = cache.head_dim,
          .value_dim = cache.value_dim,
          .scale = batch.scale,
          .window = batch.window,
          .softcap = batch.softcap};
}

// The state of one tile: kAttentionRows rows of running maximum, sum and weighted values.
struct TileState {
  SoftmaxState* states;
  float* sums;
  static size_t floats(int64_t value_dim) { return static_cast<size_t>(kAttentionRows * (2 + value_dim)); }
  static TileState at(float* memory) {
    static_assert(sizeof(SoftmaxState) == 2 * sizeof(float));
    return {reinterpret_cast<SoftmaxState*>(memory), memory + 2 * kAttentionRows};
  }
};

struct Context {
  const Kernels& kernels;
  const AttentionBatch& batch;
  const KvCache& cache;
  MutableRows out;
};

void clear(const TileState& state) { std::fill_n(state.states, kAttentionRows, SoftmaxState{0, 0}); }

void merge(const Context& c, const TileSpec& spec, const TileState& state, const TileState& part) {
  for (int64_t row = 0; row < spec.tokens * spec.heads; ++row) {
    const int64_t at = row * c.cache.value_dim;
    c.kernels.attention_merge(state.states[row], state.sums + at, part.states[row], part.sums + at, c.cache.value_dim);
  }
}

void finish(const Context& c, const TileSpec& spec, const TileState& state) {
  for (int64_t row = 0; row < spec.tokens * spec.heads; ++row) {
    const int64_t head = spec.first_head + row % spec.heads;
    float* out = c.out.data + (spec.first_token + row / spec.heads) * c.out.stride + head * c.cache.value_dim;
    const float* sink = c.batch.sinks == nullptr ? nullptr : c.batch.sinks + head;
    c.kernels.attention_finish(state.states[row], state.sums + row * c.cache.value_dim, sink, out, c.cache.value_dim);
  }
}

// One tile from its first partition to its last on one thread.
void attend_whole(const Context& c, const TileSpec& spec, float* scratch) {
  const TileState state = TileState::at(scratch);
  const TileState part = TileState::at(scratch + TileState::floats(c.cache.value_dim));
  void* rest = scratch + 2 * TileState::floats(c.cache.value_dim);
  const AttentionTile tile = tile_of(c.batch, c.cache, spec);
  c.kernels.attention_query(tile, rest);
  clear(state);
  for (int64_t p = spec.first_partition; p < spec.end_partition; ++p) {
    c.kernels.attention_partition(tile, p, part.states, part.sums, rest);
    merge(c, spec, state, part);
  }
  finish(c, spec, state);
  if (c.kernels.after_products != nullptr) c.kernels.after_products();
}

// Few tiles, long contexts: partitions in parallel into memory of their own, then merged in the same ascending order as
// attend_whole does, so the result is the same to the bit.
void attend_split(Pool& pool, const Context& c, const std::vector<TileSpec>& tiles, size_t scratch_bytes) {
  std::vector<std::pair<size_t, int64_t>> parts;  // (tile, partition)
  std::vector<size_t> first_part;
  for (size_t i = 0; i < tiles.size(); ++i) {
    first_part.push_back(parts.size());
    for (int64_t p = tiles[i].first_partition; p < tiles[i].end_partition; ++p) parts.emplace_back(i, p);
  }
  const size_t floats = TileState::floats(c.cache.value_dim);
  static thread_local Scratch buffer;
  float* memory = static_cast<float*>(buffer.reserve(parts.size() * floats * sizeof(float)));
  pool.run(static_cast<int64_t>(parts.size()), scratch_bytes, [&](int64_t i, void* scratch) {
    const auto [tile, partition] = parts[static_cast<size_t>(i)];
    const TileState part = TileState::at(memory + static_cast<size_t>(i) * floats);
    const AttentionTile t = tile_of(c.batch, c.cache, tiles[tile]);
    c.kernels.attention_query(t, scratch);
    c.kernels.attention_partition(t, partition, part.states, part.sums, scratch);
    if (c.kernels.after_products != nullptr) c.kernels.after_products();
  });
  pool.run(static_cast<int64_t>(tiles.size()), floats * sizeof(float), [&](int64_t i, void* scratch) {
    const TileSpec& spec = tiles[static_cast<size_t>(i)];
    const TileState state = TileState::at(static_cast<float*>(scratch));
    clear(state);
    for (int64_t p = spec.first_partition; p < spec.end_partition; ++p) {
      const size_t part = first_part[static_cast<size_t>(i)] + static_cast<size_t>(p - spec.first_partition);
      merge(c, spec, state, TileState::at(memory + part * floats));
    }
    finish(c, spec, state);
  });
}

// Writes one token's key and value heads.
void write_token(const Kernels& kernels, const float* key, const float* value, const KvCache& cache, int64_t slot) {
  const int64_t block = slot / cache.block_size;
  const int64_t offset = slot % cache.block_size;
  const int64_t element = cache.element_bytes();
  char* keys = static_cast<char*>(cache.keys) + block * cache.key_block_stride * element;
  char* values = static_cast<char*>(cache.values) + block * cache.value_block_stride * element;
  for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
    const int64_t key_tile = head * cache.key_head_elements() + offset / 16 * cache.key_tile_elements();
    kernels.write_key(key + head * cache.head_dim, keys + key_tile * element, offset % 16, cache.head_dim, cache.type);
    char* value_head = values + head * cache.value_head_elements() * element;
    uint8_t* power = reinterpret_cast<uint8_t*>(value_head) + cache.block_size * cache.value_dim + offset;
    kernels.write_value(value + head * cache.value_dim, value_head + cache.first_value(offset) * element, power,
                        cache.value_dim, cache.type);
  }
}

// Tokens per tile of the cheap per-token work.
constexpr int64_t kTokensPerTile = 8;

template <class PerToken>
void for_tokens(Pool& pool, int64_t tokens, size_t scratch_bytes, const PerToken& per_token) {
  pool.run(ceil_div(tokens, kTokensPerTile), scratch_bytes, [&](int64_t tile, void* scratch) {
    const int64_t end = std::min(tokens, (tile + 1) * kTokensPerTile);
    for (int64_t token = tile * kTokensPerTile; token < end; ++token) per_token(token, static_cast<float*>(scratch));
  });
}

}  // namespace

void paged_attention(Pool& pool, const AttentionBatch& batch, const KvCache& cache, MutableRows out) {
  const Context context{active(), batch, cache, out};
  const std::vector<TileSpec> tiles = plan_tiles(batch, cache);
  const size_t scratch_bytes = context.kernels.attention_scratch(cache.head_dim, cache.value_dim);
  const bool few = static_cast<int64_t>(tiles.size()) < kTilesPerThread * pool.threads();
  const bool long_contexts = std::any_of(tiles.begin(), tiles.end(),
                                         [](const TileSpec& t) { return t.end_partition - t.first_partition > 1; });
  if (few && long_contexts && pool.threads() > 1) return attend_split(pool, context, tiles, scratch_bytes);
  const size_t states = 2 * TileState::floats(cache.value_dim) * sizeof(float);
  pool.run(static_cast<int64_t>(tiles.size()), states + scratch_bytes, [&](int64_t i, void* scratch) {
    attend_whole(context, tiles[static_cast<size_t>(i)], static_cast<float*>(scratch));
  });
}

void write_kv(Pool& pool, int64_t tokens, Heads key, Heads value, const KvCache& cache, const int64_t* slots) {
  const Kernels& kernels = active();
  for_tokens(pool, tokens, 0, [&](int64_t t, float*) {
    write_token(kernels, key.data + t * key.stride, value.data + t * value.stride, cache, slots[t]);
  });
}

void rope_write_kv(Pool& pool, const Rows& qkv, int64_t num_heads, const Rotation& rotation, const HeadNorms& norms,
                   const KvCache& cache, const int64_t* slots, float* q_out) {
  const Kernels& kernels = active();
  const int64_t q_floats = num_heads * cache.head_dim;
  const int64_t k_floats = cache.num_kv_heads * cache.head_dim;
  for_tokens(pool, qkv.rows, static_cast<size_t>(k_floats) * sizeof(float), [&](int64_t t, float* key) {
    const float* line = qkv.data + t * qkv.stride;
    float* query = q_out + t * q_floats;
    std::memcpy(query, line, static_cast<size_t>(q_floats) * sizeof(float));
    std::memcpy(key, line + q_floats, static_cast<size_t>(k_floats) * sizeof(float));
    RotaryHeads heads{.x = query,
                      .heads = num_heads,
                      .head_dim = cache.head_dim,
                      .norm = norms.query,
                      .eps = norms.eps,
                      .cos = rotation.cos_of(t),
                      .sin = rotation.sin_of(t),
                      .half = rotation.half};
    kernels.rotary(heads);
    heads.x = key;
    heads.heads = cache.num_kv_heads;
    heads.norm = norms.key;
    kernels.rotary(heads);
    write_token(kernels, key, line + q_floats + k_floats, cache, slots[t]);
  });
}

}  // namespace twinplane::kernels
