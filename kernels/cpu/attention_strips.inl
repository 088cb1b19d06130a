// Attention of one tile over one partition of the keys, with vectors. Included by isa_*.cpp before attention.inl.
//
// Both products are small matrix products over the tile's rows: scores = Q K^T with 16 keys to a vector (K lies
// transposed inside its 16-key tiles), sums = P V with 16 value dims to a vector. Each score is one chain over the head
// dim, each sum one chain over the keys in ascending order, and keys a row may not see weigh exactly 0 in its chain. So
// a row's result does not depend on the rows computed beside it (INV-10).

namespace twinplane::kernels::TWINPLANE_ISA {

// Vectors per row such that the sums, one line of keys or values and one broadcast fit the registers. A line in pairs
// is two, unless pairs are multiplied together.
template <class Element>
constexpr int vectors_per_row(int rows) {
  constexpr int kLines = kInPairs<Element> && !Dots<Element>::kHas ? 2 : 1;
  int vectors = 4;
  while (vectors > 1 && rows * vectors + vectors * kLines + 1 > kRegisters) vectors /= 2;
  return vectors;
}

// The powers of 16 values from position `key` on, a multiple of 16.
inline F16 value_powers(const AttentionTile& t, int64_t key) {
  const Fp8* powers = value_line<Fp8>(t, key / t.block_size, t.block_size);  // after the last line
  return F16::load_powers(reinterpret_cast<const uint8_t*>(powers + key % t.block_size));
}

// c + a b, or the products of pairs.
template <class Element>
TWINPLANE_INLINE inline F16 plus_products(F16 c, F16 a, F16 b) {
  if constexpr (Dots<Element>::kHas) {
    return Dots<Element>::plus(c, a, b);
  } else {
    return c.plus_product(a, b);
  }
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
      unroll<Vectors>([&](auto v) TWINPLANE_INLINE {
        c[r.value][v.value] = plus_products<Element>(c[r.value][v.value], q, keys[v.value]);
      });
    });
  };
  constexpr int64_t kStep = kInPairs<Element> ? 2 : 1;
  int64_t d = 0;
  for (; d + kStep <= head_dim; d += kStep) {
    unroll<Vectors>([&](auto v) TWINPLANE_INLINE {
      if (!kHasPowers<Element> || d % 4 == 0) __builtin_prefetch(next[v.value] + d * 16);
    });
    if constexpr (Dots<Element>::kHas) {
      add(d / 2, [&](const Element* tile) TWINPLANE_INLINE { return Dots<Element>::load(tile + d * 16); });
    } else if constexpr (kInPairs<Element>) {
      add(d, [&](const Element* tile) TWINPLANE_INLINE { return F16::load_even(tile + d * 16); });
      asm volatile("" ::: "memory");  // loads the line again: there is no register to keep it in
      add(d + 1, [&](const Element* tile) TWINPLANE_INLINE { return F16::load_odd(tile + d * 16); });
    } else {
      add(d, [&](const Element* tile) TWINPLANE_INLINE { return F16::load(tile + d * 16); });
    }
  }
  if (d < head_dim) {
    if constexpr (Dots<Element>::kHas) {
      add(d / 2, [&](const Element* tile) TWINPLANE_INLINE { return Dots<Element>::load_single(tile + d * 16); });
    } else {
      add(d, [&](const Element* tile) TWINPLANE_INLINE { return F16::load(tile + d * 16); });
    }
  }
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

// Where the values of the keys lie that are read first.
template <class Element, int Vectors>
inline void first_values(const AttentionTile& t, const KeyRange& keys, const Element* (&values)[Vectors]) {
  for (int v = 0; v < Vectors; ++v) {
    const int64_t wanted = keys.base() + 16 * v < keys.end ? keys.base() + 16 * v : keys.base();
    const int64_t key = keys.first + wanted;
    values[v] = value_line<Element>(t, key / t.block_size, key % t.block_size);
  }
}

// Where a partition's keys lie that are read first, or null.
template <class Element>
inline const Element* first_keys(const AttentionPartition& partition) {
  if (partition.tile == nullptr) return nullptr;
  const AttentionTile& t = *partition.tile;
  const KeyRange keys = visible_keys(t, partition.index, t.first_position, t.first_position + t.tokens - 1);
  return keys.begin < keys.end ? key_tile<Element>(t, keys.first + keys.base()) : nullptr;
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
    if (key + 16 * kVectors < keys.end) {
      key_tiles(t, keys, key + 16 * kVectors, next);
    } else {
      first_values(t, keys, next);
    }
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
      if constexpr (Dots<Element>::kHas) {
        Dots<Element>::store_first(kept, 16, scores, key - tile.base());  // behind what is still to be read
      } else {
        kept.store(at + v.value * 16);
      }
    });
  };
  constexpr int kVectors = kRegisters >= 32 ? 4 : 1;
  int64_t key = tile.base();
  for (; key + 16 * (kVectors - 1) < tile.end; key += 16 * kVectors) weigh(Index<kVectors>{}, key);
  for (; key < tile.end; key += 16) weigh(Index<1>{}, key);
  return {max, total.sum()};
}

// sums[row][column ..] for Vectors vectors of value dims (the last one cut to `width` floats if Masked), Rows rows.
// Meanwhile the next block is fetched, and `after` beside the last one.
template <class Element, int Rows, int Vectors, bool Masked>
[[gnu::noinline]] void value_strip(const AttentionTile& t, const KeyRange& keys, const float* weights, int64_t column,
                                   int64_t width, const Element* after, float* sums) {
  F16 c[Rows][Vectors];
  unroll<Rows>([&](auto r) TWINPLANE_INLINE {
    unroll<Vectors>([&](auto v) TWINPLANE_INLINE { c[r.value][v.value] = F16::zero(); });
  });
  const StripRows<Rows> rows(weights, kAttentionSplit);
  // With weight i of each row: that of a key from the base on, or of a pair of them.
  const auto add = [&](int64_t i, const auto& load) TWINPLANE_INLINE {
    F16 values[Vectors];
    unroll<Vectors>([&](auto v) TWINPLANE_INLINE { values[v.value] = load(v); });
    unroll<Rows>([&](auto r) TWINPLANE_INLINE {
      const F16 w = rows.at(r, i);
      unroll<Vectors>([&](auto v) TWINPLANE_INLINE {
        c[r.value][v.value] = plus_products<Element>(c[r.value][v.value], w, values[v.value]);
      });
    });
  };
  const int64_t base = keys.base();
  constexpr int64_t kStep = kInPairs<Element> ? 2 : 1;
  for (int64_t key = keys.begin; key < keys.end;) {
    const int64_t offset = (keys.first + key) % t.block_size / kStep * kStep;
    const int64_t left = t.block_size - (keys.first + key) % t.block_size;
    const int64_t end = key + left < keys.end ? key + left : keys.end;
    const int64_t block = (keys.first + key) / t.block_size;
    const Element* line = value_line<Element>(t, block, offset) + column * kStep;
    const Element* ahead = end < keys.end ? value_line<Element>(t, block + 1, offset) : after;
    ahead = ahead != nullptr ? ahead + column * kStep : line;
    for (; key < end; line += t.value_dim * kStep, ahead += t.value_dim * kStep) {
      unroll<Vectors>([&](auto v) TWINPLANE_INLINE { __builtin_prefetch(ahead + v.value * 16 * kStep); });
      if constexpr (Dots<Element>::kHas) {
        // Of a pair at either end one may be out of the range, and weighs nothing.
        add((key - base) / 2, [&](auto v) TWINPLANE_INLINE {
          return Masked ? Dots<Element>::load_first(line, width) : Dots<Element>::load(line + v.value * 32);
        });
        key = key / 2 * 2 + 2;
      } else if constexpr (kInPairs<Element>) {
        // The first key may be the second one of a pair, and the last one the first.
        if (key % 2 == 0) {
          add(key++ - base, [&](auto v) TWINPLANE_INLINE {
            return Masked ? F16::load_first_even(line, width) : F16::load_even(line + v.value * 32);
          });
        }
        if (key == end) break;
        if constexpr (Masked) asm volatile("" ::: "memory");  // as above
        add(key++ - base, [&](auto v) TWINPLANE_INLINE {
          return Masked ? F16::load_first_odd(line, width) : F16::load_odd(line + v.value * 32);
        });
      } else {
        add(key++ - base, [&](auto v) TWINPLANE_INLINE {
          return Masked ? F16::load_first(line, width) : F16::load(line + v.value * 16);
        });
      }
    }
  }
  unroll<Rows>([&](auto r) TWINPLANE_INLINE {
    unroll<Vectors>([&](auto v) TWINPLANE_INLINE {
      float* out = sums + r.value * t.value_dim + column;
      const F16 sum = kHasPowers<Element> ? c[r.value][v.value] * F16::broadcast(kFp8Unit) : c[r.value][v.value];
      if constexpr (Masked) {
        sum.store_first(out, width);
      } else {
        sum.store(out + v.value * 16);
      }
    });
  });
}

template <class Element, int Rows>
void value_rows(const AttentionTile& t, const KeyRange& keys, const float* weights, const Element* after, float* sums) {
  constexpr int kVectors = vectors_per_row<Element>(Rows);
  int64_t column = 0;
  for (; column + 16 * kVectors <= t.value_dim; column += 16 * kVectors)
    value_strip<Element, Rows, kVectors, false>(t, keys, weights, column, 0, after, sums);
  for (; column + 16 <= t.value_dim; column += 16)
    value_strip<Element, Rows, 1, false>(t, keys, weights, column, 0, after, sums);
  if (column < t.value_dim)
    value_strip<Element, Rows, 1, true>(t, keys, weights, column, t.value_dim - column, after, sums);
}

template <class Element>
void attention_partition_of(const AttentionTile& t, int64_t partition, const AttentionPartition& next,
                            SoftmaxState* states, float* sums, void* scratch) {
  const float* query = static_cast<const float*>(scratch);
  float* scores = static_cast<float*>(scratch) + kAttentionRows * t.head_dim;
  const int64_t rows = t.tokens * t.heads;
  const KeyRange keys = visible_keys(t, partition, t.first_position, t.first_position + t.tokens - 1);
  const int64_t strips = (rows + kStripRows - 1) / kStripRows;
  const Element* after = first_keys<Element>(next);
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
      value_rows<Element, r.value>(t, keys, strip_scores, after, sums + row * t.value_dim);
    });
    row += count;
  }
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
