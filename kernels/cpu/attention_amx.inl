// Attention over a bfloat16 cache on AMX. Included by isa_amx.cpp last; attention.inl does the same with vectors.
//
// Keys and values are what the matrix unit multiplies. Queries and weights go as two bfloat16 numbers each, which hold
// them to 2^-16 of themselves; what comes of keys and values that were rounded to 2^-9 is no coarser for it. Sixteen
// rows of a tile at a time:
//
//   scores    query [rows][32 dims]     times keys [16 pairs of dims][16 keys], tiles of the cache as they lie
//   sums      weights [rows][32 keys]   times values [16 pairs of keys][16 dims]
//
// The values of a step's 32 keys are multiplied where they lie if they follow each other and all of them count. Else
// they are collected, once for all rows: blocks may lie apart, and what must not count may be anything.
//
// Steps are counted from the partition's first key, so a row's sums are those of the same 32 keys whatever tile the row
// is in; a key it may not see weighs 0, and a step without one it sees adds 0 (INV-10).

namespace twinplane::kernels::amx {
namespace {

constexpr int64_t kKeySteps = kAttentionSplit / kGroup;
constexpr int kColumnTiles = 4;  // multiplied with one tile of rows together: registers for sums

// 32 numbers of 16 rows: the nearest bfloat16 numbers, and what is left.
struct alignas(64) RowTile {
  uint16_t pieces[2][kTileRows][kGroup];
};

// Of 32 keys. Weights take the place of the scores they come from, line by line, so that they stay in the first cache.
union ScoreTile {
  float scores[2][kTileRows][16];
  RowTile weights;
};
static_assert(sizeof(ScoreTile) == sizeof(RowTile));

// 32 dims of 16 keys. In a tile of 16 keys in the cache, those of all dims follow each other.
struct alignas(32) Tile {
  Bf16 pairs[kPairs][16][2];
};

int64_t steps_of(int64_t depth) { return (depth + kGroup - 1) / kGroup; }

struct AttentionScratch {
  RowTile* query;     // [kAttentionRows / kTileRows][steps of dims]
  ScoreTile* scores;  // [kKeySteps], of one tile of rows
  Tile* last_keys;    // [kColumnTiles]: the last dims of keys, where there are fewer than 32, and zeros
  Bf16* values;       // [kKeySteps][kPairs][whole_dims][2]: values that are collected

  static size_t bytes(int64_t head_dim, int64_t value_dim) {
    return static_cast<size_t>(kAttentionRows / kTileRows * steps_of(head_dim)) * sizeof(RowTile) +
           kKeySteps * sizeof(ScoreTile) + kColumnTiles * sizeof(Tile) +
           static_cast<size_t>(kKeySteps * kGroup * whole_dims(value_dim)) * sizeof(Bf16);
  }
  static int64_t whole_dims(int64_t value_dim) { return (value_dim + 15) / 16 * 16; }

  AttentionScratch(const AttentionTile& t, void* memory) {
    query = static_cast<RowTile*>(memory);
    scores = reinterpret_cast<ScoreTile*>(query + kAttentionRows / kTileRows * steps_of(t.head_dim));
    last_keys = reinterpret_cast<Tile*>(scores + kKeySteps);
    values = reinterpret_cast<Bf16*>(last_keys + kColumnTiles);
  }

  // Of row r for 16 keys from `key` on.
  float* scores_at(int64_t key, int64_t r) const { return scores[key / kGroup].scores[key % kGroup / 16][r]; }
};

// Where 16 keys each, and their values, lie. Of those outside the range it is the first or the last: nobody looks at
// them.
struct KeyTiles {
  const Bf16* keys[kAttentionSplit / 16];
  const Bf16* values[kAttentionSplit / 16];

  KeyTiles() = default;
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
    if (first % 2 != 0) keys[first - 1] = keys[first], values[first - 1] = values[first];
    if (end % 2 != 0) keys[end] = keys[end - 1], values[end] = values[end - 1];
  }
};

// With few rows, memory is what there is to wait for, and blocks are scattered, so the processor can not guess them.
// Values are asked for while scores are computed, and the keys of the next partition while values are summed.
inline bool asks_ahead(const AttentionTile& t) { return t.tokens * t.heads <= kTileRows; }

// 16 keys or values of so many dims.
inline void ask_for(const Bf16* tile, int64_t dims) {
  for (int64_t i = 0; i < dims * 16; i += 32) __builtin_prefetch(tile + i, 0, 2);
}

// The keys of the next partition, shared out to the steps of this one.
class NextKeys {
 public:
  NextKeys(const AttentionPartition& next, int64_t steps) : next_(next) {
    if (next.tile == nullptr) return;
    const AttentionTile& t = *next.tile;
    const KeyRange keys = visible_keys(t, next.index, t.first_position, t.first_position + t.tokens - 1);
    if (keys.begin >= keys.end) return;
    at_ = keys.base() / 16;
    end_ = (keys.end + 15) / 16;
    per_step_ = (end_ - at_ + steps - 1) / steps;
    tiles_ = KeyTiles(t, keys);
  }

  void ask() {
    for (int64_t i = 0; i < per_step_ && at_ < end_; ++i, ++at_) ask_for(tiles_.keys[at_], next_.tile->head_dim);
  }

 private:
  AttentionPartition next_;
  int64_t at_ = 0;
  int64_t end_ = 0;
  int64_t per_step_ = 0;
  KeyTiles tiles_;
};

// The values of each step: pairs of keys `stride` elements apart.
struct ValueSteps {
  const Bf16* steps[kKeySteps];
  int64_t stride;

  ValueSteps(const AttentionTile& t, const KeyRange& range, const KeyTiles& from, const AttentionScratch& scratch) {
    const int64_t dims = AttentionScratch::whole_dims(t.value_dim);
    stride = 2 * dims;
    for (int64_t step = range.begin / kGroup; step * kGroup < range.end; ++step) {
      const bool all = step * kGroup >= range.begin && (step + 1) * kGroup <= range.end;
      const Bf16* first = from.values[2 * step];
      if (all && dims == t.value_dim && from.values[2 * step + 1] == first + 16 * t.value_dim) {
        steps[step] = first;
        continue;
      }
      Bf16* collected = scratch.values + step * kGroup * dims;
      collect(t.value_dim, range, step * kGroup, first, collected);
      collect(t.value_dim, range, step * kGroup + 16, from.values[2 * step + 1], collected + 16 * dims);
      steps[step] = collected;
    }
  }

 private:
  // The values of 16 keys, zeros for those out of the range.
  static void collect(int64_t value_dim, const KeyRange& range, int64_t key, const Bf16* from, Bf16* out) {
    for (int64_t pair = 0; pair < 8; ++pair, key += 2, from += 2 * value_dim) {
      const bool even = key >= range.begin && key < range.end;
      const bool odd = key + 1 >= range.begin && key + 1 < range.end;
      const __m512i mask = _mm512_set1_epi32((even ? 0xFFFF : 0) | (odd ? INT32_MIN >> 15 : 0));
      for (int64_t d = 0; d < value_dim; d += 16, out += 32) {
        const int64_t left = value_dim - d;
        const __mmask16 dims = !(even || odd) ? 0 : left >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << left) - 1);
        _mm512_store_si512(out, _mm512_and_si512(_mm512_maskz_loadu_epi32(dims, from + 2 * d), mask));
      }
    }
  }
};

// The lines of a tile of keys from dim `from` on, and zeros: what is behind the tile may be anything.
void copy_last_keys(const Bf16* tile, int64_t from, int64_t head_dim, Tile& out) {
  for (int64_t row = 0; row < kPairs; ++row) {
    const int64_t d = from + 2 * row;
    __m512i keys = _mm512_setzero_si512();
    if (d + 1 < head_dim) {
      keys = _mm512_loadu_si512(tile + d * 16);
    } else if (d < head_dim) {  // alone
      keys = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + d * 16)));
    }
    _mm512_store_si512(out.pairs[row], keys);
  }
}

// Line r of a tile of rows.
TWINPLANE_INLINE inline void store_pieces(F16 first, F16 second, RowTile& out, int64_t r) {
  const __m512i order =
      _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);  // packing takes four of the first, four of the second
  const auto store = [&](int piece, __m512i low, __m512i high) TWINPLANE_INLINE {
    const __m512i packed = _mm512_packus_epi32(_mm512_srli_epi32(low, 16), _mm512_srli_epi32(high, 16));
    _mm512_store_si512(out.pieces[piece][r], _mm512_permutexvar_epi64(order, packed));
  };
  // Adding half of what is cut off rounds. That may make anything of a NaN, but then what is left is one.
  const auto rounded = [](F16 x) TWINPLANE_INLINE {
    return _mm512_add_epi32(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x8000));
  };
  const auto left = [](F16 x, __m512i coarse) TWINPLANE_INLINE {
    const __m512i upper_half = _mm512_and_si512(coarse, _mm512_set1_epi32(INT32_MIN >> 15));
    return _mm512_castps_si512((x - F16{_mm512_castsi512_ps(upper_half)}).v);
  };
  const __m512i coarse[2] = {rounded(first), rounded(second)};
  store(0, coarse[0], coarse[1]);
  store(1, left(first, coarse[0]), left(second, coarse[1]));
}

void split_query(const float* x, int64_t depth, RowTile* out, int64_t r) {
  for (int64_t k = 0; k < depth; k += kGroup, ++out)
    store_pieces(F16::load_first(x + k, depth - k), F16::load_first(x + k + 16, depth - k - 16), *out, r);
}

// Registers: sums of each tile of columns 0 to 3, the pieces of rows 4 and 5, columns 6 and 7 by turns.
template <int Column>
TWINPLANE_INLINE inline void clear_sums() {
  if constexpr (Column == 0) _tile_zero(0);
  if constexpr (Column == 1) _tile_zero(1);
  if constexpr (Column == 2) _tile_zero(2);
  if constexpr (Column == 3) _tile_zero(3);
}

template <int Column>
TWINPLANE_INLINE inline void store_sums(float* out, int64_t stride) {
  if constexpr (Column == 0) _tile_stored(0, out, stride * 4);
  if constexpr (Column == 1) _tile_stored(1, out, stride * 4);
  if constexpr (Column == 2) _tile_stored(2, out, stride * 4);
  if constexpr (Column == 3) _tile_stored(3, out, stride * 4);
}

#define TWINPLANE_ADD_PIECES(SUMS, COLUMNS, from) \
  _tile_loadd(COLUMNS, from, stride);             \
  _tile_dpbf16ps(SUMS, 5, COLUMNS);               \
  _tile_dpbf16ps(SUMS, 4, COLUMNS)

// Sums += a tile of rows times the columns, lines `stride` bytes apart.
template <int Columns>
TWINPLANE_INLINE inline void multiply_tiles(const RowTile& x, const void* const (&columns)[Columns], int64_t stride) {
  _tile_loadd(4, x.pieces[0], 2 * kGroup);
  _tile_loadd(5, x.pieces[1], 2 * kGroup);
  unroll<Columns>([&](auto c) TWINPLANE_INLINE {
    const void* from = columns[c.value];
    if constexpr (c.value == 0) {
      TWINPLANE_ADD_PIECES(0, 6, from);
    }
    if constexpr (c.value == 1) {
      TWINPLANE_ADD_PIECES(1, 7, from);
    }
    if constexpr (c.value == 2) {
      TWINPLANE_ADD_PIECES(2, 6, from);
    }
    if constexpr (c.value == 3) {
      TWINPLANE_ADD_PIECES(3, 7, from);
    }
  });
}
#undef TWINPLANE_ADD_PIECES

// Scores of a tile of rows for tiles first .. first + Columns - 1 of 16 keys.
template <int Columns>
TWINPLANE_INLINE inline void score_columns(const AttentionTile& t, const KeyTiles& from, int64_t first,
                                           const RowTile* query, const AttentionScratch& scratch) {
  const int64_t whole = t.head_dim / kGroup;
  const void* keys[Columns];
  unroll<Columns>([&](auto c) TWINPLANE_INLINE {
    if (whole * kGroup < t.head_dim)
      copy_last_keys(from.keys[first + c.value], whole * kGroup, t.head_dim, scratch.last_keys[c.value]);
  });
  memory_is_tiles();
  unroll<Columns>([&](auto c) TWINPLANE_INLINE { clear_sums<c.value>(); });
  for (int64_t d = 0; d < whole; ++d) {
    unroll<Columns>([&](auto c) TWINPLANE_INLINE { keys[c.value] = from.keys[first + c.value] + d * kGroup * 16; });
    multiply_tiles<Columns>(query[d], keys, sizeof(Tile) / kPairs);
  }
  if (whole * kGroup < t.head_dim) {
    unroll<Columns>([&](auto c) TWINPLANE_INLINE { keys[c.value] = scratch.last_keys + c.value; });
    multiply_tiles<Columns>(query[whole], keys, sizeof(Tile) / kPairs);
  }
  unroll<Columns>([&](auto c)
                      TWINPLANE_INLINE { store_sums<c.value>(scratch.scores_at((first + c.value) * 16, 0), 16); });
  memory_is_tiles();
}

// Scores of a tile of rows for all keys.
[[gnu::noinline]] void score_tiles(const AttentionTile& t, const KeyRange& keys, const KeyTiles& from,
                                   const RowTile* query, const AttentionScratch& scratch) {
  const int64_t end = (keys.end + kGroup - 1) / kGroup * 2;
  for (int64_t i = keys.begin / kGroup * 2; i < end; i += kColumnTiles) {
    if (asks_ahead(t))
      for (int64_t tile = i; tile < end && tile < i + kColumnTiles; ++tile) ask_for(from.values[tile], t.value_dim);
    if (i + kColumnTiles <= end) {
      score_columns<kColumnTiles>(t, from, i, query, scratch);
    } else {
      score_columns<kColumnTiles / 2>(t, from, i, query, scratch);
    }
  }
}

void cap_scores(const Weights& weights, const KeyRange& keys, const AttentionScratch& scratch, int64_t rows) {
  for (int64_t key = keys.base(); key < keys.end; key += 16) {
    for (int64_t r = 0; r < rows; ++r) {
      float* scores = scratch.scores_at(key, r);
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
    greatest[0] = greatest[0].max(F16::load(scratch.scores_at(key, r)));
    greatest[1] = greatest[1].max(F16::load(scratch.scores_at(key + 16, r)));
  }
  for (; key < row.end; key += 16)
    greatest[0] = greatest[0].max(row.keep(key, F16::load(scratch.scores_at(key, r)), lowest));
  return greatest[0].max(greatest[1]).greatest();
}

// Row r of the scores of some steps -> pieces of its weights, which are added to `total`.
template <int Steps>
TWINPLANE_INLINE inline void weigh_steps(const Weights& weights, const KeyRange& row, float greatest,
                                         const AttentionScratch& scratch, int64_t r, int64_t first, F16 (&total)[2]) {
  F16 weight[2 * Steps];
  unroll<2 * Steps>([&](auto i) TWINPLANE_INLINE {
    weight[i.value] = F16::load(scratch.scores[first + i.value / 2].scores[i.value % 2][r]);
  });
  weights.weigh(weight, greatest);
  const int64_t key = first * kGroup;
  if (key < row.begin || key + Steps * kGroup > row.end) {
    unroll<2 * Steps>(
        [&](auto i) TWINPLANE_INLINE { weight[i.value] = row.keep(key + 16 * i.value, weight[i.value], F16::zero()); });
  }
  unroll<2 * Steps>([&](auto i) TWINPLANE_INLINE { total[i.value % 2] = total[i.value % 2] + weight[i.value]; });
  unroll<Steps>([&](auto i) TWINPLANE_INLINE {
    store_pieces(weight[2 * i.value], weight[2 * i.value + 1], scratch.scores[first + i.value].weights, r);
  });
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
    greatest[r] = weights.power(greatest_score(visible[r], scratch, r));
  }
  constexpr int kTogether = 2;
  const int64_t end = (keys.end + kGroup - 1) / kGroup;
  for (int64_t r = 0; r < rows; ++r) {
    F16 total[2] = {F16::zero(), F16::zero()};
    int64_t step = keys.begin / kGroup;
    for (; step + kTogether <= end; step += kTogether)
      weigh_steps<kTogether>(weights, visible[r], greatest[r], scratch, r, step, total);
    for (; step < end; ++step) weigh_steps<1>(weights, visible[r], greatest[r], scratch, r, step, total);
    states[r] = {greatest[r], (total[0] + total[1]).sum()};
  }
}

// Sums of a tile of rows.
[[gnu::noinline]] void sum_values(const AttentionTile& t, const KeyRange& keys, const ValueSteps& values,
                                  const AttentionScratch& scratch, int64_t rows, float* sums, NextKeys& next) {
  const int64_t first = keys.begin / kGroup;
  const int64_t end = (keys.end + kGroup - 1) / kGroup;
  for (int64_t d = 0; d < t.value_dim; d += kColumnTiles * 16) {
    const int64_t left = t.value_dim - d;
    with_rows<kColumnTiles>((left + 15) / 16, [&](auto columns) TWINPLANE_INLINE {
      constexpr int kColumns = columns.value;
      memory_is_tiles();
      unroll<kColumns>([&](auto c) TWINPLANE_INLINE { clear_sums<c.value>(); });
      for (int64_t step = first; step < end; ++step) {
        next.ask();
        const void* from[kColumns];
        unroll<kColumns>([&](auto c) TWINPLANE_INLINE { from[c.value] = values.steps[step] + 2 * (d + 16 * c.value); });
        multiply_tiles<kColumns>(scratch.scores[step].weights, from, values.stride * 2);
      }
      if (left >= kColumns * 16) {
        unroll<kColumns>([&](auto c) TWINPLANE_INLINE { store_sums<c.value>(sums + d + 16 * c.value, t.value_dim); });
        memory_is_tiles();
        return;
      }
      float whole[kTileRows][kColumns * 16];
      unroll<kColumns>([&](auto c) TWINPLANE_INLINE { store_sums<c.value>(whole[0] + 16 * c.value, kColumns * 16); });
      memory_is_tiles();
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < left; ++i) sums[r * t.value_dim + d + i] = whole[r][i];
    });
  }
}

}  // namespace

size_t attention_scratch(int64_t head_dim, int64_t value_dim) {
  const size_t vectors = avx512::kTable.attention_scratch(head_dim, value_dim);  // for other caches
  const size_t tiles = AttentionScratch::bytes(head_dim, value_dim);
  return tiles > vectors ? tiles : vectors;
}

void attention_query(const AttentionTile& t, void* memory) {
  if (t.type != KvType::kBfloat16) return avx512_bf16::attention_query(t, memory);
  const AttentionScratch scratch(t, memory);
  for (int64_t row = 0; row < t.tokens * t.heads; ++row) {
    const float* query = t.query + row / t.heads * t.query_stride + row % t.heads * t.head_dim;
    split_query(query, t.head_dim, scratch.query + row / kTileRows * steps_of(t.head_dim), row % kTileRows);
  }
}

void attention_partition(const AttentionPartition& now, const AttentionPartition& next, SoftmaxState* states,
                         float* sums, void* memory) {
  const AttentionTile& t = *now.tile;
  if (t.type != KvType::kBfloat16) return avx512_bf16::attention_partition(now, next, states, sums, memory);
  const int64_t partition = now.index;
  const AttentionScratch scratch(t, memory);
  const int64_t rows = t.tokens * t.heads;
  const KeyRange keys = visible_keys(t, partition, t.first_position, t.first_position + t.tokens - 1);
  if (keys.begin >= keys.end) {
    for (int64_t row = 0; row < rows; ++row) states[row] = {0, 0};
    return;
  }
  shape_tiles({rows < kTileRows ? rows : kTileRows, 2 * kGroup, kPairs});
  const KeyTiles from(t, keys);
  NextKeys next_keys(asks_ahead(t) ? next : AttentionPartition{}, steps_of(keys.end) - keys.begin / kGroup);
  const ValueSteps values(t, keys, from, scratch);
  for (int64_t first = 0; first < rows; first += kTileRows) {
    const RowTile* query = scratch.query + first / kTileRows * steps_of(t.head_dim);
    score_tiles(t, keys, from, query, scratch);
    const int64_t count = rows - first < kTileRows ? rows - first : kTileRows;
    weigh_tile(t, keys, partition, first, count, scratch, states + first);
    sum_values(t, keys, values, scratch, count, sums + first * t.value_dim, next_keys);
  }
}

}  // namespace twinplane::kernels::amx
