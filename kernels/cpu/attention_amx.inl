// Attention over a bfloat16 cache on AMX. Included by isa_amx.cpp last; attention.inl does the same with vectors.
//
// Queries and weights are float32, so they go as three pieces each (SplitTile); keys and values are what the matrix unit
// multiplies. Sixteen rows of a tile at a time:
//
//   scores    query [rows][32 dims]     times keys [16 pairs of dims][16 keys], tiles of the cache as they lie
//   sums      weights [rows][32 keys]   times values [16 pairs of keys][16 dims]
//
// The 32 keys of a step come from blocks that may lie apart, and some of them must not count, whatever lies there: values
// are collected into tiles, once for all rows.
//
// Steps are counted from the partition's first key, so a row's sums are those of the same 32 keys whatever tile the row
// is in; a key it may not see weighs 0, and a step without one it sees adds 0 (INV-10).

namespace twinplane::kernels::amx {
namespace {

constexpr int64_t kKeySteps = kAttentionSplit / kGroup;
constexpr int64_t kTileBytes = 1024;

using TileOfScores = float[kTileRows][16];  // 16 keys

// A pair of tiles that are multiplied together.
struct TilePair {
  alignas(64) char first[kTileBytes];
  char second[kTileBytes];
};

int64_t steps_of(int64_t depth) { return (depth + kGroup - 1) / kGroup; }

struct AttentionScratch {
  SplitTile* query;      // [kAttentionRows / kTileRows][steps of dims]
  SplitTile* weights;    // [kKeySteps], of one tile of rows
  TileOfScores* scores;  // [kAttentionSplit / 16], likewise
  TilePair* values;      // [ceil(value_dim / 32)][kKeySteps]
  TilePair* last_keys;   // of 32 keys, the last dims where there are fewer than 32, and zeros

  static constexpr size_t kFixed =
      kKeySteps * sizeof(SplitTile) + kAttentionSplit / 16 * sizeof(TileOfScores) + sizeof(TilePair);

  static size_t bytes(int64_t head_dim, int64_t value_dim) {
    return kFixed + static_cast<size_t>(kAttentionRows / kTileRows * steps_of(head_dim)) * sizeof(SplitTile) +
           static_cast<size_t>(steps_of(value_dim) * kKeySteps) * sizeof(TilePair);
  }

  AttentionScratch(const AttentionTile& t, void* memory) {
    query = static_cast<SplitTile*>(memory);
    weights = query + kAttentionRows / kTileRows * steps_of(t.head_dim);
    scores = reinterpret_cast<TileOfScores*>(weights + kKeySteps);
    last_keys = reinterpret_cast<TilePair*>(scores + kAttentionSplit / 16);
    values = last_keys + 1;
  }
};

// Where 16 keys each, and their values, lie. Of those outside the range it is the first or the last: nobody looks at them.
struct KeyTiles {
  const Bf16* keys[kAttentionSplit / 16];
  const Bf16* values[kAttentionSplit / 16];

  KeyTiles(const AttentionTile& t, const KeyRange& range) {
    const int64_t first = range.base() / 16;
    const int64_t end = (range.end + 15) / 16;
    int64_t block = (range.first + range.base()) / t.block_size;
    int64_t offset = (range.first + range.base()) % t.block_size;
    for (int64_t i = first; i < end; ++i) {
      keys[i] = static_cast<const Bf16*>(t.keys) + t.table[block] * t.key_block_stride + offset * t.head_dim;
      values[i] = static_cast<const Bf16*>(t.values) + t.table[block] * t.value_block_stride + offset * t.value_dim;
      offset += 16;
      if (offset == t.block_size) offset = 0, ++block;
    }
    // Steps are of two.
    if (first % 2 != 0) keys[first - 1] = keys[first];
    if (end % 2 != 0) keys[end] = keys[end - 1];
  }
};

// Asks for lines of 64 bytes, for the second cache.
inline void prefetch_lines(const Bf16* p, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(p + 32 * i, 0, 2);
}

// Which line of a tile of values the keys 2 `pair` and 2 `pair` + 1 of a step are: so they meet the weights that
// store_pieces wrote.
constexpr int64_t value_row(int64_t pair) { return pair % 8 / 2 * 4 + pair / 8 * 2 + pair % 2; }

// Which of 16 dims from `left` of the end on there are.
inline __mmask16 dims_left(int64_t left) {
  return static_cast<__mmask16>(left >= 16 ? 0xFFFF : left > 0 ? (1u << left) - 1 : 0);
}

// The lines of 16 keys, all of them seen: half of each tile of a step.
TWINPLANE_INLINE inline void collect_half(const Bf16* from, int64_t value_dim, int64_t half, TilePair* out) {
  for (int64_t d = 0; d < value_dim; d += 32, out += kKeySteps) {
    const __mmask16 first = dims_left(value_dim - d);
    const __mmask16 second = dims_left(value_dim - d - 16);
    unroll<8>([&](auto pair) TWINPLANE_INLINE {
      const Bf16* line = from + (pair.value * value_dim + d) * 2;
      const int64_t row = 64 * value_row(8 * half + pair.value);
      _mm512_store_si512(out->first + row, _mm512_maskz_loadu_epi32(first, line));
      _mm512_store_si512(out->second + row, _mm512_maskz_loadu_epi32(second, line + 32));
    });
  }
}

// The values of the keys of all steps; zeros for keys that are not seen.
void collect_values(const AttentionTile& t, const KeyRange& keys, const KeyTiles& from, TilePair* out) {
  for (int64_t key = keys.begin / kGroup * kGroup; key < (keys.end + kGroup - 1) / kGroup * kGroup; key += 16) {
    TilePair* tiles = out + key / kGroup;
    const int64_t half = key % kGroup / 16;
    if (key >= keys.begin && key + 16 <= keys.end) {
      collect_half(from.values[key / 16], t.value_dim, half, tiles);
      continue;
    }
    for (int64_t pair = 0; pair < 8; ++pair) {
      const auto seen = [&](int64_t i) { return i >= keys.begin && i < keys.end; };
      const bool even = seen(key + 2 * pair);
      const bool odd = seen(key + 2 * pair + 1);
      const __m512i mask = _mm512_set1_epi32((even ? 0xFFFF : 0) | (odd ? INT32_MIN >> 15 : 0));
      const int64_t row = 64 * value_row(8 * half + pair);
      for (int64_t d = 0; d < t.value_dim; d += 32) {
        TilePair& to = tiles[d / 32 * kKeySteps];
        __m512i first = _mm512_setzero_si512();
        __m512i second = _mm512_setzero_si512();
        if (even || odd) {
          const Bf16* line = from.values[key / 16] + 2 * (pair * t.value_dim + d);
          first = _mm512_maskz_loadu_epi32(dims_left(t.value_dim - d), line);
          second = _mm512_maskz_loadu_epi32(dims_left(t.value_dim - d - 16), line + 32);
        }
        _mm512_store_si512(to.first + row, _mm512_and_si512(first, mask));
        _mm512_store_si512(to.second + row, _mm512_and_si512(second, mask));
      }
    }
  }
}

// The lines of a tile of keys from dim `from` on, and zeros: what is behind the tile may be anything.
void copy_last_keys(const Bf16* tile, int64_t from, int64_t head_dim, char* out) {
  for (int64_t row = 0; row < kPairs; ++row) {
    const int64_t d = from + 2 * row;
    __m512i keys = _mm512_setzero_si512();
    if (d + 1 < head_dim) {
      keys = _mm512_loadu_si512(tile + d * 16);
    } else if (d < head_dim) {  // alone
      keys = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + d * 16)));
    }
    _mm512_store_si512(out + 64 * row, keys);
  }
}

// Tiles 0 and 1 += a tile of rows times two tiles of columns.
TWINPLANE_INLINE inline void multiply_pair(const SplitTile* x, const void* first, const void* second) {
  _tile_loadd(6, first, 64);
  _tile_loadd(7, second, 64);
  multiply_piece<1>(x, 0, 2);
  multiply_piece<1>(x, 0, 1);
  multiply_piece<1>(x, 0, 0);
}

// Scores of a tile of rows for all keys. `Ahead`: asks for the next keys, and for the values.
template <bool Ahead>
[[gnu::noinline]] void score_tiles(const AttentionTile& t, const KeyRange& keys, const KeyTiles& from,
                                   const SplitTile* query, const AttentionScratch& scratch) {
  const int64_t whole = t.head_dim / kGroup;
  const int64_t last = (keys.end - 1) / 16;
  for (int64_t i = keys.begin / kGroup * 2; i <= last; i += 2) {
    const Bf16* first = from.keys[i];
    const Bf16* second = from.keys[i + 1];
    if constexpr (Ahead) {
      for (int64_t j = i; j < i + 2 && j <= last; ++j) {
        if (j + 2 <= last) prefetch_lines(from.keys[j + 2], t.head_dim / 2);
        if (j * 16 >= keys.base()) prefetch_lines(from.values[j], t.value_dim / 2);
      }
    }
    if (whole * kGroup < t.head_dim) {
      copy_last_keys(first, whole * kGroup, t.head_dim, scratch.last_keys->first);
      copy_last_keys(second, whole * kGroup, t.head_dim, scratch.last_keys->second);
    }
    memory_is_tiles();
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < whole; ++d) multiply_pair(query + d, first + d * kGroup * 16, second + d * kGroup * 16);
    if (whole * kGroup < t.head_dim) multiply_pair(query + whole, scratch.last_keys->first, scratch.last_keys->second);
    _tile_stored(0, scratch.scores[i], 64);
    _tile_stored(1, scratch.scores[i + 1], 64);
    memory_is_tiles();
  }
}

// Scores of row r for 16 keys from `key` on.
inline float* scores_at(const AttentionScratch& scratch, int64_t key, int64_t r) { return scratch.scores[key / 16][r]; }

void cap_scores(const Weights& weights, const KeyRange& keys, const AttentionScratch& scratch, int64_t rows) {
  for (int64_t key = keys.base(); key < keys.end; key += 16) {
    for (int64_t r = 0; r < rows; ++r) {
      float* scores = scores_at(scratch, key, r);
      weights.cap(F16::load(scores)).store(scores);
    }
  }
}

// Of row r, among the keys it sees.
inline float greatest_score(const KeyRange& row, const AttentionScratch& scratch, int64_t r) {
  const F16 lowest = F16::broadcast(-HUGE_VALF);
  F16 greatest[2] = {lowest, lowest};
  int64_t key = row.base();
  for (; key >= row.begin && key + 32 <= row.end; key += 32) {
    greatest[0] = greatest[0].max(F16::load(scores_at(scratch, key, r)));
    greatest[1] = greatest[1].max(F16::load(scores_at(scratch, key + 16, r)));
  }
  for (; key < row.end; key += 16)
    greatest[0] = greatest[0].max(row.keep(key, F16::load(scores_at(scratch, key, r)), lowest));
  return greatest[0].max(greatest[1]).greatest();
}

// Row r of the scores -> pieces of its weights, for all steps; returns their sum.
TWINPLANE_INLINE inline float weigh_row(const Weights& weights, const KeyRange& keys, const KeyRange& row,
                                        float greatest, const AttentionScratch& scratch, int64_t r) {
  F16 total[2] = {F16::zero(), F16::zero()};
  for (int64_t step = keys.begin / kGroup; step * kGroup < keys.end; ++step) {
    const int64_t key = step * kGroup;
    F16 weight[2];
    unroll<2>([&](auto half) TWINPLANE_INLINE {
      weight[half.value] = weights.of(F16::load(scores_at(scratch, key + 16 * half.value, r)), greatest);
    });
    if (key < row.begin || key + kGroup > row.end) {
      unroll<2>([&](auto half) TWINPLANE_INLINE {
        weight[half.value] = row.keep(key + 16 * half.value, weight[half.value], F16::zero());
      });
    }
    unroll<2>([&](auto half) TWINPLANE_INLINE { total[half.value] = total[half.value] + weight[half.value]; });
    store_pieces(weight[0], weight[1], scratch.weights[step], r);
  }
  return (total[0] + total[1]).sum();
}

// Scores of a tile of rows, the first of which is row `first` of `t`, -> weights.
[[gnu::noinline]] void weigh_tile(const AttentionTile& t, const KeyRange& keys, int64_t partition, int64_t first,
                                  int64_t rows, const AttentionScratch& scratch, SoftmaxState* states) {
  const Weights weights(t);
  if (weights.softcap > 0) cap_scores(weights, keys, scratch, rows);
  KeyRange visible[kTileRows];
  float greatest[kTileRows];
  // A loop of its own: rows do not wait for each other's maximum.
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t position = position_of(t, first + r);
    visible[r] = visible_keys(t, partition, position, position);
    greatest[r] = greatest_score(visible[r], scratch, r);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float sum = weigh_row(weights, keys, visible[r], greatest[r], scratch, r);
    states[r] = {weights.exponent(greatest[r]), sum};
  }
}

// Sums of a tile of rows.
[[gnu::noinline]] void sum_values(const AttentionTile& t, const KeyRange& keys, const AttentionScratch& scratch,
                                  int64_t rows, float* sums) {
  const int64_t first_step = keys.begin / kGroup;
  const int64_t end_step = (keys.end + kGroup - 1) / kGroup;
  for (int64_t column = 0; column < t.value_dim; column += 32) {
    const TilePair* values = scratch.values + column / 32 * kKeySteps;
    memory_is_tiles();
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = first_step; step < end_step; ++step)
      multiply_pair(scratch.weights + step, values[step].first, values[step].second);
    if (column + 32 <= t.value_dim) {
      _tile_stored(0, sums + column, t.value_dim * 4);
      _tile_stored(1, sums + column + 16, t.value_dim * 4);
      memory_is_tiles();
      continue;
    }
    TileOfScores last[2];
    _tile_stored(0, last[0], 64);
    _tile_stored(1, last[1], 64);
    memory_is_tiles();
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = column; d < t.value_dim; ++d) sums[r * t.value_dim + d] = last[(d - column) / 16][r][d % 16];
  }
}

}  // namespace

size_t attention_scratch(int64_t head_dim, int64_t value_dim) {
  const size_t vectors = avx512::kTable.attention_scratch(head_dim, value_dim);  // for other caches
  const size_t tiles = AttentionScratch::bytes(head_dim, value_dim);
  return tiles > vectors ? tiles : vectors;
}

void attention_query(const AttentionTile& t, void* memory) {
  if (t.type != KvType::kBfloat16) return avx512::kTable.attention_query(t, memory);
  const AttentionScratch scratch(t, memory);
  for (int64_t row = 0; row < t.tokens * t.heads; ++row) {
    const float* query = t.query + row / t.heads * t.query_stride + row % t.heads * t.head_dim;
    split_row(query, t.head_dim, scratch.query + row / kTileRows * steps_of(t.head_dim), row % kTileRows);
  }
}

void attention_partition(const AttentionTile& t, int64_t partition, SoftmaxState* states, float* sums, void* memory) {
  if (t.type != KvType::kBfloat16) return avx512::kTable.attention_partition(t, partition, states, sums, memory);
  const AttentionScratch scratch(t, memory);
  const int64_t rows = t.tokens * t.heads;
  const KeyRange keys = visible_keys(t, partition, t.first_position, t.first_position + t.tokens - 1);
  if (keys.begin >= keys.end) {
    for (int64_t row = 0; row < rows; ++row) states[row] = {0, 0};
    return;
  }
  shape_tiles({rows < kTileRows ? rows : kTileRows, 2 * kGroup, kPairs});
  const KeyTiles from(t, keys);
  const bool from_memory = t.tokens == 1;  // a chunk's other tiles read the same keys
  for (int64_t first = 0; first < rows; first += kTileRows) {
    const SplitTile* query = scratch.query + first / kTileRows * steps_of(t.head_dim);
    (from_memory && first == 0 ? score_tiles<true> : score_tiles<false>)(t, keys, from, query, scratch);
    if (first == 0) collect_values(t, keys, from, scratch.values);
    const int64_t count = rows - first < kTileRows ? rows - first : kTileRows;
    weigh_tile(t, keys, partition, first, count, scratch, states + first);
    sum_values(t, keys, scratch, count, sums + first * t.value_dim);
  }
}

}  // namespace twinplane::kernels::amx
