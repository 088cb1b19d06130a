#include "kernels/cpu/attention.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace twinplane::kernels {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Fewer tiles than this per thread: partitions of one tile are computed by different threads.
constexpr int64_t kTilesPerThread = 4;

// Query tokens [first_token, + tokens) for the query heads [first_head, + heads) that share a KV head: of one sequence,
// or one of each of as many sequences.
struct TileSpec {
  int64_t sequence;  // whose block table it is
  int64_t kv_head;
  int64_t first_head;
  int64_t heads;
  int64_t first_token;  // row of the batch's query
  int64_t tokens;
  int64_t first_position;
  int64_t first_partition;
  int64_t end_partition;
  // If another tile computes partitions 0 .. first_partition - 1: the number of the first of these parts, and where in
  // them this tile's rows begin. Else -1.
  int64_t shared_parts = -1;
  int64_t shared_row = 0;
};

// One partition of a tile, computed by itself.
struct Part {
  TileSpec tile;
  int64_t partition;
};

struct Plan {
  std::vector<TileSpec> tiles;
  std::vector<Part> shared;
};

// So many partitions have the same blocks in two sequences, among the first `most`.
int64_t common_partitions(const int32_t* a, const int32_t* b, int64_t block_size, int64_t most) {
  const int64_t blocks = kAttentionSplit / block_size;
  for (int64_t p = 0; p < most; ++p)
    if (!std::equal(a + p * blocks, a + (p + 1) * blocks, b + p * blocks)) return p;
  return most;
}

// Sequences first .. end - 1 of the batch, whose queries are one token each, and the partitions they have in common and
// see whole.
struct Family {
  int64_t first;
  int64_t end;
  int64_t partitions;
};

// Samples of one prompt, beams, requests behind one system prompt: their keys and values are read once for all of them.
Family family_of(const AttentionBatch& batch, const KvCache& cache, int64_t first) {
  const auto whole_partitions = [&](int64_t s) {
    const bool decodes = batch.query_start[s + 1] - batch.query_start[s] == 1;
    return decodes && batch.window == 0 ? batch.context_lens[s] / kAttentionSplit : int64_t{0};
  };
  Family family{first, first + 1, whole_partitions(first)};
  while (family.partitions > 0 && family.end < batch.num_sequences) {
    const int64_t most = std::min(family.partitions, whole_partitions(family.end));
    const int64_t common = common_partitions(batch.table(first), batch.table(family.end), cache.block_size, most);
    // Nobody joins with whom fewer reads would be saved.
    const int64_t members = family.end - family.first;
    if (common * members <= family.partitions * (members - 1)) break;
    family.partitions = common;
    ++family.end;
  }
  return family;
}

// Cuts the batch into tiles. More than kAttentionRows query heads on one KV head are cut too. Tiles that read the same
// keys follow each other, so that these stay in a cache.
Plan plan_tiles(const AttentionBatch& batch, const KvCache& cache) {
  const int64_t group = batch.num_heads / cache.num_kv_heads;
  const int64_t heads_per_tile = std::min(group, kAttentionRows);
  const int64_t tokens_per_tile = kAttentionRows / heads_per_tile;
  Plan plan;
  const auto for_heads = [&](const auto& each) {
    for (int64_t kv_head = 0; kv_head < cache.num_kv_heads; ++kv_head) {
      for (int64_t head = 0; head < group; head += heads_per_tile)
        each(kv_head, kv_head * group + head, std::min(heads_per_tile, group - head));
    }
  };
  const auto plan_family = [&](const Family& family) {
    for_heads([&](int64_t kv_head, int64_t first_head, int64_t heads) {
      for (int64_t s = family.first; s < family.end; s += tokens_per_tile) {
        const int64_t tokens = std::min(tokens_per_tile, family.end - s);
        const TileSpec tile{.sequence = family.first,
                            .kv_head = kv_head,
                            .first_head = first_head,
                            .heads = heads,
                            .first_token = batch.query_start[s],
                            .tokens = tokens,
                            .first_position = family.partitions * kAttentionSplit,  // they see all of them
                            .first_partition = 0,
                            .end_partition = family.partitions};
        const int64_t parts = static_cast<int64_t>(plan.shared.size());
        for (int64_t p = 0; p < family.partitions; ++p) plan.shared.push_back({tile, p});
        for (int64_t i = 0; i < tokens; ++i) {
          TileSpec own = tile;
          own.sequence = s + i;
          own.first_token += i;
          own.tokens = 1;
          own.first_position = batch.context_lens[s + i] - 1;
          own.first_partition = family.partitions;
          own.end_partition = own.first_position / kAttentionSplit + 1;
          own.shared_parts = parts;
          own.shared_row = i * heads;
          plan.tiles.push_back(own);
        }
      }
    });
  };
  const auto plan_sequence = [&](int64_t s) {
    const int64_t begin = batch.query_start[s];
    const int64_t end = batch.query_start[s + 1];
    for_heads([&](int64_t kv_head, int64_t first_head, int64_t heads) {
      for (int64_t token = begin; token < end; token += tokens_per_tile) {
        const int64_t tokens = std::min(tokens_per_tile, end - token);
        const int64_t position = batch.context_lens[s] - (end - token);
        const int64_t oldest = batch.window > 0 ? std::max<int64_t>(0, position - batch.window + 1) : 0;
        plan.tiles.push_back({.sequence = s,
                              .kv_head = kv_head,
                              .first_head = first_head,
                              .heads = heads,
                              .first_token = token,
                              .tokens = tokens,
                              .first_position = position,
                              .first_partition = oldest / kAttentionSplit,
                              .end_partition = (position + tokens - 1) / kAttentionSplit + 1});
      }
    });
  };
  for (int64_t s = 0; s < batch.num_sequences;) {
    const Family family = family_of(batch, cache, s);
    if (family.end > s + 1) {
      plan_family(family);
    } else {
      plan_sequence(s);
    }
    s = family.end;
  }
  return plan;
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

  // Adds the rows of `part` from `row` on to those of the tile.
  void merge(const TileSpec& spec, const TileState& state, const TileState& part, int64_t row) const {
    const int64_t dims = cache.value_dim;
    for (int64_t r = 0; r < spec.tokens * spec.heads; ++r) {
      kernels.attention_merge(state.states[r], state.sums + r * dims, part.states[row + r],
                              part.sums + (row + r) * dims, dims);
    }
  }

  void finish(const TileSpec& spec, const TileState& state) const {
    for (int64_t r = 0; r < spec.tokens * spec.heads; ++r) {
      const int64_t head = spec.first_head + r % spec.heads;
      float* to = out.data + (spec.first_token + r / spec.heads) * out.stride + head * cache.value_dim;
      const float* sink = batch.sinks == nullptr ? nullptr : batch.sinks + head;
      kernels.attention_finish(state.states[r], state.sums + r * cache.value_dim, sink, to, cache.value_dim);
    }
  }
};

// The first partition of a tile, if it has one of its own.
AttentionPartition first_partition(const TileSpec& spec, const AttentionTile& tile) {
  return spec.first_partition < spec.end_partition ? AttentionPartition{&tile, spec.first_partition}
                                                   : AttentionPartition{};
}

// Parts of tiles, computed in parallel.
class Parts {
 public:
  Parts(Pool& pool, const Context& c, const std::vector<Part>& parts, size_t scratch_bytes)
      : floats_(TileState::floats(c.cache.value_dim)) {
    if (parts.empty()) return;
    static thread_local Scratch buffer;
    memory_ = static_cast<float*>(buffer.reserve(parts.size() * floats_ * sizeof(float)));
    const int64_t count = static_cast<int64_t>(parts.size());
    const auto compute = [&](int64_t i, void* scratch, int worker) {
      const Part& part = parts[static_cast<size_t>(i)];
      const Part& after = parts[static_cast<size_t>(pool.goes_on(count, i, worker) ? i + 1 : i)];
      const AttentionTile tile = tile_of(c.batch, c.cache, part.tile);
      const AttentionTile next = tile_of(c.batch, c.cache, after.tile);
      const TileState state = at(i);
      c.kernels.attention_query(tile, scratch);
      c.kernels.attention_partition({&tile, part.partition}, {&next, after.partition}, state.states, state.sums,
                                    scratch);
    };
    pool.run_indexed(count, scratch_bytes, compute);
  }

  TileState at(int64_t i) const { return TileState::at(memory_ + static_cast<size_t>(i) * floats_); }

 private:
  size_t floats_;
  float* memory_ = nullptr;
};

// Begins a tile with the partitions that were computed for several.
void begin(const Context& c, const TileSpec& spec, const TileState& state, const Parts& parts) {
  std::fill_n(state.states, kAttentionRows, SoftmaxState{0, 0});
  if (spec.shared_parts < 0) return;
  for (int64_t p = 0; p < spec.first_partition; ++p)
    c.merge(spec, state, parts.at(spec.shared_parts + p), spec.shared_row);
}

// One tile from its first partition to its last on one thread, which `after` is given next.
void attend_whole(const Context& c, const TileSpec& spec, const TileSpec& after, const Parts& parts, float* scratch) {
  const TileState state = TileState::at(scratch);
  const TileState part = TileState::at(scratch + TileState::floats(c.cache.value_dim));
  void* rest = scratch + 2 * TileState::floats(c.cache.value_dim);
  const AttentionTile tile = tile_of(c.batch, c.cache, spec);
  const AttentionTile next_tile = tile_of(c.batch, c.cache, after);
  begin(c, spec, state, parts);
  c.kernels.attention_query(tile, rest);
  for (int64_t p = spec.first_partition; p < spec.end_partition; ++p) {
    const AttentionPartition next =
        p + 1 < spec.end_partition ? AttentionPartition{&tile, p + 1} : first_partition(after, next_tile);
    c.kernels.attention_partition({&tile, p}, next, part.states, part.sums, rest);
    c.merge(spec, state, part, 0);
  }
  c.finish(spec, state);
}

// Few tiles, long contexts: all partitions in parallel, then merged in the same ascending order as attend_whole does,
// so the result is the same to the bit.
void attend_split(Pool& pool, const Context& c, Plan plan, size_t scratch_bytes) {
  std::vector<int64_t> first_part;
  for (const TileSpec& tile : plan.tiles) {
    first_part.push_back(static_cast<int64_t>(plan.shared.size()));
    for (int64_t p = tile.first_partition; p < tile.end_partition; ++p) plan.shared.push_back({tile, p});
  }
  const Parts parts(pool, c, plan.shared, scratch_bytes);
  pool.run(static_cast<int64_t>(plan.tiles.size()), TileState::floats(c.cache.value_dim) * sizeof(float),
           [&](int64_t i, void* scratch) {
             const TileSpec& spec = plan.tiles[static_cast<size_t>(i)];
             const TileState state = TileState::at(static_cast<float*>(scratch));
             begin(c, spec, state, parts);
             for (int64_t p = spec.first_partition; p < spec.end_partition; ++p) {
               const int64_t part = first_part[static_cast<size_t>(i)] + p - spec.first_partition;
               c.merge(spec, state, parts.at(part), 0);
             }
             c.finish(spec, state);
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
  Plan plan = plan_tiles(batch, cache);
  const std::vector<TileSpec>& tiles = plan.tiles;
  const size_t scratch_bytes = context.kernels.attention_scratch(cache.head_dim, cache.value_dim);
  const bool few = static_cast<int64_t>(tiles.size()) < kTilesPerThread * pool.threads();
  const bool long_contexts = std::any_of(tiles.begin(), tiles.end(),
                                         [](const TileSpec& t) { return t.end_partition - t.first_partition > 1; });
  if (few && long_contexts && pool.threads() > 1) return attend_split(pool, context, std::move(plan), scratch_bytes);
  const Parts parts(pool, context, plan.shared, scratch_bytes);
  const size_t states = 2 * TileState::floats(cache.value_dim) * sizeof(float);
  const int64_t count = static_cast<int64_t>(tiles.size());
  const auto attend = [&](int64_t i, void* scratch, int worker) {
    const TileSpec& after = tiles[static_cast<size_t>(pool.goes_on(count, i, worker) ? i + 1 : i)];
    attend_whole(context, tiles[static_cast<size_t>(i)], after, parts, static_cast<float*>(scratch));
  };
  pool.run_indexed(count, states + scratch_bytes, attend);
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
