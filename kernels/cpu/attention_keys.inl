// What attention sees of a partition of the keys, where they lie, and how scores become weights. Included before
// attention.inl and attention_amx.inl.

namespace twinplane::kernels::TWINPLANE_ISA {

// Keys of one partition that any row of the tile may see, relative to the partition's first key. `base` is the first
// score computed: a whole vector starts at a key divisible by 16.
struct KeyRange {
  int64_t first;  // absolute position of the partition
  int64_t begin;
  int64_t end;
  int64_t base() const { return begin / 16 * 16; }
  // Of 16 values at keys `i` .. those of keys in the range; `fill` for the others.
  F16 keep(int64_t i, F16 values, F16 fill) const {
    return i >= begin && i + 16 <= end ? values : values.keep(begin - i, end - i, fill);
  }
};

inline int64_t position_of(const AttentionTile& t, int64_t row) { return t.first_position + row / t.heads; }

inline int64_t first_visible(const AttentionTile& t, int64_t position) {
  return t.window > 0 && position >= t.window ? position - t.window + 1 : 0;
}

inline int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

inline KeyRange visible_keys(const AttentionTile& t, int64_t partition, int64_t from_position, int64_t to_position) {
  const int64_t first = partition * kAttentionSplit;
  return {first, clamp(first_visible(t, from_position) - first, 0, kAttentionSplit),
          clamp(to_position + 1 - first, 0, kAttentionSplit)};
}

template <class Element>
inline constexpr bool kHasPowers = sizeof(Element) == 1;  // FP8, see KvType

template <class Element>
inline constexpr bool kInPairs = sizeof(Element) < 4;  // bfloat16 and FP8

// Where an instruction set multiplies pairs at once, specialized: rows of queries and weights are words of two numbers
// then (isa_avx512_bf16.cpp).
template <class Element>
struct Dots {
  static constexpr bool kHas = false;
};

template <class Element>
inline const Element* key_tile(const AttentionTile& t, int64_t key) {
  return static_cast<const Element*>(t.keys) + t.table[key / t.block_size] * t.key_block_stride +
         key % t.block_size / 16 * (t.head_dim + kHasPowers<Element>)*16;
}

// In pairs: of an even `offset`.
template <class Element>
inline const Element* value_line(const AttentionTile& t, int64_t block, int64_t offset) {
  return static_cast<const Element*>(t.values) + t.table[block] * t.value_block_stride + offset * t.value_dim;
}

inline constexpr float kLog2E = 1.44269504f;

// From scores, products of queries and keys, to weights e^(scale (score - greatest)): powers of two.
struct Weights {
  float softcap;
  float softcap_factor;
  float factor;  // of what is weighed

  explicit Weights(const AttentionTile& t)
      : softcap(t.softcap),
        softcap_factor(softcap > 0 ? t.scale / softcap : 0),
        factor((softcap > 0 ? 1 : t.scale) * kLog2E) {}

  // Scores as a softcap leaves them: scaled.
  F16 cap(F16 score) const { return tanh(score * F16::broadcast(softcap_factor)) * F16::broadcast(softcap); }
  float power(float score) const { return score * factor; }
  // `greatest` is a power: weights are relative to it, whatever it was rounded to. NaN stays NaN.
  template <int N>
  TWINPLANE_INLINE void weigh(F16 (&scores)[N], float greatest) const {
    unroll<N>([&](auto i) TWINPLANE_INLINE {
      scores[i.value] = F16::broadcast(-greatest).plus_product(scores[i.value], F16::broadcast(factor));
    });
    powers_of_two(scores);
  }
};

}  // namespace twinplane::kernels::TWINPLANE_ISA
