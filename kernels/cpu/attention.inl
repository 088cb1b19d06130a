// Attention of one tile over one partition of the keys. Included by each isa_*.cpp last.
//
// Both products are small matrix products over the tile's rows: scores = Q K^T with 16 keys to a vector (K lies
// transposed inside its 16-key tiles), sums = P V with 16 value dims to a vector. Each score is one chain over the head
// dim, each sum one chain over the keys in ascending order, and keys a row may not see weigh exactly 0 in its chain. So
// a row's result does not depend on the rows computed beside it (INV-10).

namespace twinplane::kernels::TWINPLANE_ISA {

// Vectors per row such that the sums, one line of keys or values and one broadcast fit the registers. A line in pairs
// is two.
template <class Element>
constexpr int vectors_per_row(int rows) {
  constexpr int kLines = kInPairs<Element> ? 2 : 1;
  int vectors = 4;
  while (vectors > 1 && rows * vectors + vectors * kLines + 1 > kRegisters) vectors /= 2;
  return vectors;
}

// The powers of 16 values from position `key` on, a multiple of 16.
inline F16 value_powers(const AttentionTile& t, int64_t key) {
  const Fp8* powers = value_line<Fp8>(t, key / t.block_size, t.block_size);  // after the last line
  return F16::load_powers(reinterpret_cast<const uint8_t*>(powers + key % t.block_size));
}

// scores[row][16 * i ..] for Vectors key tiles, Rows rows. Meanwhile the tiles `next` are fetched: blocks are
// scattered, so the processor can not guess them.
template <class Element, int Rows, int Vectors>
[[gnu::noinline]] void score_strip(const float* query, int64_t head_dim, const Element* const (&tiles)[Vectors],
                                   const Element* const (&next)[Vectors], float* scores) {
  F16 c[Rows][Vectors];
  unroll<Rows>([&](auto r) TWINPLANE_INLINE {
    unroll<Vectors>([&](auto v) TWINPLANE_INLINE { c[r.value][v.value] = F16::zero(); });
  });
  const StripRows<Rows> rows(query, head_dim);
  const auto add = [&](int64_t d, const auto& load) TWINPLANE_INLINE {
    F16 keys[Vectors];
    unroll<Vectors>([&](auto v) TWINPLANE_INLINE { keys[v.value] = load(tiles[v.value]); });
    unroll<Rows>([&](auto r) TWINPLANE_INLINE {
      const F16 q = rows.at(r, d);
      unroll<Vectors>(
          [&](auto v) TWINPLANE_INLINE { c[r.value][v.value] = c[r.value][v.value].plus_product(q, keys[v.value]); });
    });
  };
  constexpr int64_t kStep = kInPairs<Element> ? 2 : 1;
  int64_t d = 0;
  for (; d + kStep <= head_dim; d += kStep) {
    unroll<Vectors>([&](auto v) TWINPLANE_INLINE {
      if (!kHasPowers<Element> || d % 4 == 0) __builtin_prefetch(next[v.value] + d * 16);
    });
    if constexpr (kInPairs<Element>) {
      add(d, [&](const Element* tile) TWINPLANE_INLINE { return F16::load_even(tile + d * 16); });
      asm volatile("" ::: "memory");  // loads the line again: there is no register to keep it in
      add(d + 1, [&](const Element* tile) TWINPLANE_INLINE { return F16::load_odd(tile + d * 16); });
    } else {
      add(d, [&](const Element* tile) TWINPLANE_INLINE { return F16::load(tile + d * 16); });
    }
  }
  if (d < head_dim) add(d, [&](const Element* tile) TWINPLANE_INLINE { return F16::load(tile + d * 16); });
  if constexpr (kHasPowers<Element>) {
    unroll<Vectors>([&](auto v) TWINPLANE_INLINE {
      const F16 powers = F16::load_powers(reinterpret_cast<const uint8_t*>(tiles[v.value] + head_dim * 16));
      unroll<Rows>([&](auto r) TWINPLANE_INLINE { c[r.value][v.value] = c[r.value][v.value] * powers; });
    });
  }
  unroll<Rows>([&](auto r) TWINPLANE_INLINE {
    unroll<Vectors>(
        [&](auto v) TWINPLANE_INLINE { c[r.value][v.value].store(scores + r.value * kAttentionSplit + v.value * 16); });
  });
}

// The Vectors key tiles from `key` on. Past the end the last one is repeated; nobody reads the scores it gives.
template <class Element, int Vectors>
inline void key_tiles(const AttentionTile& t, const KeyRange& keys, int64_t key, const Element* (&tiles)[Vectors]) {
  for (int v = 0; v < Vectors; ++v) {
    const int64_t wanted = key + 16 * v < keys.end ? key + 16 * v : keys.end - 1;
    tiles[v] = key_tile<Element>(t, keys.first + wanted);
  }
}

template <class Element, int Rows>
void score_rows(const AttentionTile& t, const KeyRange& keys, const float* query, float* scores) {
  constexpr int kVectors = vectors_per_row<Element>(Rows);
  if (keys.begin >= keys.end) return;
  const Element* tiles[kVectors];
  const Element* next[kVectors];
  key_tiles(t, keys, keys.base(), next);
  for (int64_t key = keys.base(); key < keys.end; key += 16 * kVectors) {
    for (int v = 0; v < kVectors; ++v) tiles[v] = next[v];
    key_tiles(t, keys, key + 16 * kVectors, next);
    score_strip<Element, Rows, kVectors>(query, t.head_dim, tiles, next, scores + key - keys.base());
  }
}

// Scores -> weights e^(score - max), 0 where the row may not look. FP8: times the powers of the values they will weigh.
template <class Element>
inline SoftmaxState softmax_row(const AttentionTile& t, const KeyRange& tile, const KeyRange& row, float* scores) {
  if (row.begin >= row.end) {
    for (int64_t i = tile.base(); i < tile.end; i += 16) F16::zero().store(scores + i - tile.base());
    return {0, 0};
  }
  const F16 lowest = F16::broadcast(-HUGE_VALF);
  const Weights weights(t);
  F16 greatest = lowest;
  for (int64_t i = tile.base(); i < tile.end; i += 16) {
    float* at = scores + i - tile.base();
    if (weights.softcap > 0) weights.cap(F16::load(at)).store(at);
    greatest = greatest.max(row.keep(i, F16::load(at), lowest));
  }
  const float max = weights.power(greatest.greatest());
  F16 total = F16::zero();
  const auto weigh = [&](auto count, int64_t first) TWINPLANE_INLINE {
    F16 weight[count.value];
    float* at = scores + first - tile.base();
    unroll<count.value>([&](auto v) TWINPLANE_INLINE { weight[v.value] = F16::load(at + v.value * 16); });
    weights.weigh(weight, max);
    unroll<count.value>([&](auto v) TWINPLANE_INLINE {
      const int64_t key = first + v.value * 16;
      F16 kept = row.keep(key, weight[v.value], F16::zero());
      total = total + kept;
      if constexpr (kHasPowers<Element>) kept = row.keep(key, kept * value_powers(t, tile.first + key), F16::zero());
      kept.store(at + v.value * 16);
    });
  };
  constexpr int kVectors = kRegisters >= 32 ? 4 : 1;
  int64_t key = tile.base();
  for (; key + 16 * (kVectors - 1) < tile.end; key += 16 * kVectors) weigh(Index<kVectors>{}, key);
  for (; key < tile.end; key += 16) weigh(Index<1>{}, key);
  return {max, total.sum()};
}

// sums[row][column ..] for Vectors vectors of value dims (the last one cut to `width` floats if Masked), Rows rows.
template <class Element, int Rows, int Vectors, bool Masked>
[[gnu::noinline]] void value_strip(const AttentionTile& t, const KeyRange& keys, const float* weights, int64_t column,
                                   int64_t width, float* sums) {
  F16 c[Rows][Vectors];
  unroll<Rows>([&](auto r) TWINPLANE_INLINE {
    unroll<Vectors>([&](auto v) TWINPLANE_INLINE { c[r.value][v.value] = F16::zero(); });
  });
  const StripRows<Rows> rows(weights, kAttentionSplit);
  const auto add = [&](int64_t key, const auto& load) TWINPLANE_INLINE {
    F16 values[Vectors];
    unroll<Vectors>([&](auto v) TWINPLANE_INLINE { values[v.value] = load(v); });
    unroll<Rows>([&](auto r) TWINPLANE_INLINE {
      const F16 w = rows.at(r, key - keys.base());
      unroll<Vectors>(
          [&](auto v) TWINPLANE_INLINE { c[r.value][v.value] = c[r.value][v.value].plus_product(w, values[v.value]); });
    });
  };
  constexpr int64_t kStep = kInPairs<Element> ? 2 : 1;
  for (int64_t key = keys.begin; key < keys.end;) {
    const int64_t offset = (keys.first + key) % t.block_size / kStep * kStep;
    const int64_t left = t.block_size - (keys.first + key) % t.block_size;
    const int64_t end = key + left < keys.end ? key + left : keys.end;
    const int64_t block = (keys.first + key) / t.block_size;
    const Element* line = value_line<Element>(t, block, offset) + column * kStep;
    // The same lines of the next block, or of this one where there is none.
    const Element* ahead = value_line<Element>(t, end < keys.end ? block + 1 : block, offset) + column * kStep;
    for (; key < end; line += t.value_dim * kStep, ahead += t.value_dim * kStep) {
      unroll<Vectors>([&](auto v) TWINPLANE_INLINE { __builtin_prefetch(ahead + v.value * 16 * kStep); });
      if constexpr (kInPairs<Element>) {
        // The first key may be the second one of a pair, and the last one the first.
        if (key % 2 == 0) {
          add(key++, [&](auto v) TWINPLANE_INLINE {
            return Masked ? F16::load_first_even(line, width) : F16::load_even(line + v.value * 32);
          });
        }
        if (key == end) break;
        if constexpr (Masked) asm volatile("" ::: "memory");  // as above
        add(key++, [&](auto v) TWINPLANE_INLINE {
          return Masked ? F16::load_first_odd(line, width) : F16::load_odd(line + v.value * 32);
        });
      } else {
        add(key++, [&](auto v) TWINPLANE_INLINE {
          return Masked ? F16::load_first(line, width) : F16::load(line + v.value * 16);
        });
      }
    }
  }
  unroll<Rows>([&](auto r) TWINPLANE_INLINE {
    unroll<Vectors>([&](auto v) TWINPLANE_INLINE {
      float* out = sums + r.value * t.value_dim + column;
      if constexpr (Masked) {
        c[r.value][v.value].store_first(out, width);
      } else {
        c[r.value][v.value].store(out + v.value * 16);
      }
    });
  });
}

template <class Element, int Rows>
void value_rows(const AttentionTile& t, const KeyRange& keys, const float* weights, float* sums) {
  constexpr int kVectors = vectors_per_row<Element>(Rows);
  int64_t column = 0;
  for (; column + 16 * kVectors <= t.value_dim; column += 16 * kVectors)
    value_strip<Element, Rows, kVectors, false>(t, keys, weights, column, 0, sums);
  for (; column + 16 <= t.value_dim; column += 16)
    value_strip<Element, Rows, 1, false>(t, keys, weights, column, 0, sums);
  if (column < t.value_dim) value_strip<Element, Rows, 1, true>(t, keys, weights, column, t.value_dim - column, sums);
}

size_t attention_scratch(int64_t head_dim, int64_t) {
  return static_cast<size_t>(kAttentionRows * (head_dim + kAttentionSplit)) * sizeof(float);
}

void attention_query(const AttentionTile& t, void* scratch) {
  for (int64_t token = 0; token < t.tokens; ++token) {
    const float* from = t.query + token * t.query_stride;
    float* to = static_cast<float*>(scratch) + token * t.heads * t.head_dim;
    for (int64_t i = 0; i < t.heads * t.head_dim; ++i) to[i] = from[i];
  }
}

template <class Element>
void attention_partition_of(const AttentionTile& t, int64_t partition, SoftmaxState* states, float* sums,
                            void* scratch) {
  const float* query = static_cast<const float*>(scratch);
  float* scores = static_cast<float*>(scratch) + kAttentionRows * t.head_dim;
  const int64_t rows = t.tokens * t.heads;
  const KeyRange keys = visible_keys(t, partition, t.first_position, t.first_position + t.tokens - 1);
  const int64_t strips = (rows + kStripRows - 1) / kStripRows;
  for (int64_t i = 0, row = 0; i < strips; ++i) {
    const int64_t count = (rows - row + strips - i - 1) / (strips - i);
    with_rows<kStripRows>(count, [&](auto r) TWINPLANE_INLINE {
      float* strip_scores = scores + row * kAttentionSplit;
      score_rows<Element, r.value>(t, keys, query + row * t.head_dim, strip_scores);
      for (int64_t j = 0; j < r.value; ++j) {
        const int64_t position = position_of(t, row + j);
        const KeyRange visible = visible_keys(t, partition, position, position);
        states[row + j] = softmax_row<Element>(t, keys, visible, strip_scores + j * kAttentionSplit);
      }
      value_rows<Element, r.value>(t, keys, strip_scores, sums + row * t.value_dim);
    });
    row += count;
  }
}

// Asks only for keys and values of its own: float32 ones alone come as fast as memory gives them.
void attention_partition(const AttentionPartition& now, const AttentionPartition&, SoftmaxState* states, float* sums,
                         void* scratch) {
  const AttentionTile& t = *now.tile;
  const int64_t partition = now.index;
  switch (t.type) {
    case KvType::kFloat32:
      return attention_partition_of<float>(t, partition, states, sums, scratch);
    case KvType::kBfloat16:
      return attention_partition_of<Bf16>(t, partition, states, sums, scratch);
    case KvType::kFp8:
      return attention_partition_of<Fp8>(t, partition, states, sums, scratch);
  }
}

void attention_merge(SoftmaxState& state, float* sums, const SoftmaxState& part, const float* part_sums,
                     int64_t value_dim) {
  if (part.sum == 0) return;  // no visible key in it (one key alone weighs e^0 = 1)
  if (state.sum == 0) {
    state = part;
    for (int64_t d = 0; d < value_dim; ++d) sums[d] = part_sums[d];
    return;
  }
  const float max = part.max > state.max ? part.max : state.max;
  const float keep = power_of_two(state.max - max);
  const float add = power_of_two(part.max - max);
  state = {max, state.sum * keep + part.sum * add};
  for (int64_t d = 0; d < value_dim; ++d) sums[d] = sums[d] * keep + part_sums[d] * add;
}

void attention_finish(const SoftmaxState& state, const float* sums, const float* sink, float* out, int64_t value_dim) {
  float scale = 1;
  float denominator = state.sum;
  if (sink != nullptr) {
    // Relative to the greater of the two, so that neither exponential overflows.
    const float power = *sink * kLog2E;
    const float max = power > state.max ? power : state.max;
    scale = power_of_two(state.max - max);
    denominator = state.sum * scale + power_of_two(power - max);
  }
  const float factor = scale / denominator;
  for (int64_t d = 0; d < value_dim; ++d) out[d] = sums[d] * factor;
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
