// Panel products on AMX, the matrix unit of some processors with AVX-512; for everything else such a processor runs
// isa_avx512_bf16.cpp. A tile instruction multiplies 16 rows of x by 16 columns where a vector one takes one row.
//
// Integers (integer_product). The sums are scaled and added exactly as integer_strip (quantized.inl) does: which of the
// two runs changes no bit, so rows that do not fill a tile go there.
//
//   tile of x         16 rows of x           the numbers of one group (or part), k in order
//   tile of weights   a row for each quad    16 columns of 4 bytes: the words of a panel (formats.hpp), unpacked
//   tile of sums      16 rows of x           16 columns of int32
//
// Floats times bfloat16 weights (panel_product). The unit multiplies bfloat16 numbers, exactly, and adds in float32. A
// float is three of them (SplitTile), so it is three products. For each 32 k an instruction adds the products of one
// piece, pairs of k apart from each other, and what comes of it to the sum so far; the smallest pieces come first. As
// that is not what vector instructions do, every row goes this way, however few there are.
//
//   tile of x         16 rows of x           a piece of 32 k
//   tile of weights   a row for each two k   16 columns of pairs of bfloat16: the lines of a panel
//   tile of sums      16 rows of x           16 columns of float32
//
// Attention over a bfloat16 cache does the same (attention_amx.inl).
#include <immintrin.h>
#include <math.h>

#include "kernels/cpu/formats.hpp"
#include "kernels/cpu/kernels.hpp"
#include "kernels/cpu/simd_avx512.hpp"

namespace twinplane::kernels::amx {
using namespace avx512;
}
#define TWINPLANE_ISA amx
#include "kernels/cpu/unroll.inl"

#include "kernels/cpu/panels.inl"

#include "kernels/cpu/quantized_group.inl"

#include "kernels/cpu/exponential.inl"

#include "kernels/cpu/attention_keys.inl"

namespace twinplane::kernels::avx512 {
extern const Kernels kTable;
}
namespace twinplane::kernels::avx512_bf16 {
void attention_query(const AttentionTile&, void* scratch);
void attention_partition(const AttentionPartition&, const AttentionPartition& next, SoftmaxState* states, float* sums,
                         void* scratch);
}  // namespace twinplane::kernels::avx512_bf16

namespace twinplane::kernels::amx {
namespace {

constexpr int kQuads = kGroup / 4;

// The operand of ldtilecfg: the shape of each tile register.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t num_rows, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

// Rows of x and bytes of each; rows of weights. 0: the registers are released.
struct Shape {
  int64_t rows;
  int64_t x_bytes;
  int64_t weight_rows;
  bool operator==(const Shape&) const = default;
};
thread_local Shape shape = {};

// Registers: sums 0 to 3, x 4 and 5, weights 6 and 7. They stay so until after_job().
void shape_tiles(const Shape& wanted) {
  if (shape == wanted) return;
  TileShapes shapes;
  for (int sums = 0; sums < 4; ++sums) shapes.set(sums, wanted.rows, 64);
  for (int x = 4; x < 6; ++x) shapes.set(x, wanted.rows, wanted.x_bytes);
  for (int weights = 6; weights < 8; ++weights) shapes.set(weights, wanted.weight_rows, 64);
  // GCC 12 believes that the intrinsic reads the first 8 bytes only.
  asm volatile("" ::"r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
  shape = wanted;
}

// What tile instructions read and write, the compiler does not see.
TWINPLANE_INLINE inline void memory_is_tiles() { asm volatile("" ::: "memory"); }

// ---- quantized weights and integers

// Some groups of a panel as the tiles want them.
template <WeightKind Kind>
struct Unpacked {
  using Group = QuantizedGroup<Kind>;
  static constexpr int kParts = Group::kParts;
  static constexpr bool kMinimum = Group::kMinimum;
  static constexpr bool kInPlace = Group::kSigned;  // a panel of bytes holds tiles already
  // At a time. They should stay in the first cache, beside a tile of x and what is asked for ahead.
  static constexpr int kBlockGroups = 8;
  // Of a tile of x; fewer are done faster without.
  static constexpr int64_t kLeastRows = kInPlace ? 9 : kMinimum || kParts > 1 ? 13 : 11;
  static constexpr int64_t kStride = kInPlace ? Group::kWordBytes : 64;
  static constexpr int64_t kToRight = kInPlace ? 64 : 64 * kQuads;

  alignas(64) int8_t numbers[kInPlace ? 1 : kBlockGroups][kPanelVectors][kQuads][64];  // less the format's offset
  const uint8_t* words[kBlockGroups];
  alignas(64) float scale[kBlockGroups][kParts][kPanelVectors][16];
  alignas(64) float minimum[kBlockGroups][kPanelVectors][16];

  // The first 16 columns of a part of a group: a row for each quad, kStride bytes apart. The others are kToRight
  // behind.
  const char* tile(int64_t g, int64_t part) const {
    if constexpr (kInPlace) return reinterpret_cast<const char*>(words[g]);
    return reinterpret_cast<const char*>(numbers[g][0][part * kQuads / kParts]);
  }

  void fill(const void* panel, int64_t first, int64_t groups) {
    for (int64_t g = 0; g < groups; ++g) {
      const Group group(panel, first + g);
      unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE {
        unroll<kParts>([&](auto part)
                           TWINPLANE_INLINE { group.scale[part.value][v.value].store(scale[g][part.value][v.value]); });
        if constexpr (kMinimum) group.minimum[v.value].store(minimum[g][v.value]);
      });
      words[g] = group.words;
      if constexpr (!kInPlace) unpack(group, g);
    }
  }

 private:
  void unpack(const Group& group, int64_t g) {
    unroll<kParts>([&](auto part) TWINPLANE_INLINE {
      group.template for_quads<part.value, false>([&](int64_t t, const Words(&quad)[kPanelVectors]) TWINPLANE_INLINE {
        unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE {
          const __m512i number = _mm512_sub_epi8(quad[v.value].v, _mm512_set1_epi8(Group::kFormat.offset));
          _mm512_store_si512(numbers[g][v.value][t], number);
        });
      });
    });
  }
};

// Tiles of x times the groups unpacked. A tile's sums leave the matrix unit through memory, and vectors scale and add
// them while it multiplies the next one. What is slowest is the vectors' part: beside tiles only one of two units
// multiplies vectors. So a tile of x is loaded for both halves of a panel, and nothing waits between tiles of x.
template <WeightKind Kind>
class TileStrip {
 public:
  using Panel = Unpacked<Kind>;
  static constexpr int kParts = Panel::kParts;

  // `ahead`: for each step.
  TileStrip(const Panel& weights, int64_t groups, Ahead ahead) : weights_(weights), groups_(groups), ahead_(ahead) {}

  // `x_tile`: from one tile of x to the next.
  [[gnu::noinline]] void run(const ActivationTile* x, int64_t x_tile, int64_t tiles, float* acc) {
    start(x, 0, 0);
    for (int64_t tile = 0; tile < tiles; ++tile, x += x_tile, acc += kTileRows * kPanelColumns) {
      // There are registers for the totals of 16 columns. Those of the others stay in memory.
      F16 total[kTileRows];
      unroll<kTileRows>([&](auto r) TWINPLANE_INLINE { total[r.value] = F16::load(acc + r.value * kPanelColumns); });
      for (int64_t g = 0; g < groups_; ++g) {
        unroll<kParts>([&](auto part) TWINPLANE_INLINE {
          finish();
          if (part.value + 1 < kParts) {
            start(x, g, part.value + 1);
          } else if (g + 1 < groups_) {
            start(x, g + 1, 0);
          } else if (tile + 1 < tiles) {
            start(x + x_tile, 0, 0);
          }
          add<part.value>(x[g].rows, g, total, acc);
        });
      }
      unroll<kTileRows>([&](auto r) TWINPLANE_INLINE { total[r.value].store(acc + r.value * kPanelColumns); });
    }
  }

 private:
  TWINPLANE_INLINE void start(const ActivationTile* x, int64_t g, int64_t part) {
    for (int64_t i = 0; i < ahead_.bytes; i += 64) __builtin_prefetch(ahead_.from + i);
    ahead_.from += ahead_.bytes;
    const char* weights = weights_.tile(g, part);
    memory_is_tiles();
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, x[g].numbers[0] + part * kGroup / kParts, kGroup);
    _tile_loadd(6, weights, Panel::kStride);
    _tile_loadd(7, weights + Panel::kToRight, Panel::kStride);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    memory_is_tiles();
  }

  TWINPLANE_INLINE void finish() {
    memory_is_tiles();
    _tile_stored(0, sums_[0], 64);
    _tile_stored(1, sums_[1], 64);
    memory_is_tiles();
  }

  template <int Part>
  TWINPLANE_INLINE void add(const ActivationTile::Row* rows, int64_t g, F16 (&total)[kTileRows], float* acc) const {
    F16 scale[kPanelVectors];
    F16 minimum[kPanelVectors];
    unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE {
      scale[v.value] = F16::load(weights_.scale[g][Part][v.value]);
      if constexpr (Panel::kMinimum) minimum[v.value] = F16::load(weights_.minimum[g][v.value]);
    });
    unroll<kTileRows>([&](auto r) TWINPLANE_INLINE {
      const ActivationTile::Row& row = rows[r.value];
      const auto plus = [&](F16 to, int v) TWINPLANE_INLINE {
        const F16 sum{_mm512_cvtepi32_ps(_mm512_load_si512(sums_[v][r.value]))};
        to = to.plus_product(sum, scale[v] * F16::broadcast(row.scale));
        if constexpr (Panel::kMinimum) to = to.plus_product(minimum[v], F16::broadcast(row.weighted_sum));
        return to;
      };
      total[r.value] = plus(total[r.value], 0);
      float* out = acc + r.value * kPanelColumns + 16;
      plus(F16::load(out), 1).store(out);
    });
  }

  alignas(64) int32_t sums_[kPanelVectors][kTileRows][16];
  const Panel& weights_;
  int64_t groups_;
  Ahead ahead_;
};

// The last tile of x may have fewer rows; what comes of the others is not looked at.
template <WeightKind Kind>
void tile_product(const IntegerProduct& p) {
  constexpr int64_t kLeastRows = Unpacked<Kind>::kLeastRows;
  if (p.rows < kLeastRows) return avx512::kTable.integer_product(p);
  const int64_t groups = p.depth / kGroup;
  const int64_t tiles = (p.rows + kTileRows - kLeastRows) / kTileRows;
  for (int64_t i = 0; i < tiles * kTileRows * kPanelColumns; i += 16) F16::zero().store(p.acc + i);
  Unpacked<Kind> weights;
  shape_tiles({kTileRows, kGroup / Unpacked<Kind>::kParts, kQuads / Unpacked<Kind>::kParts});
  constexpr int64_t kBlock = Unpacked<Kind>::kBlockGroups;
  constexpr int64_t kBytes = QuantizedGroup<Kind>::kBytes;
  for (int64_t first = 0; first < groups; first += kBlock) {
    const int64_t block = groups - first < kBlock ? groups - first : kBlock;
    weights.fill(p.panel, first, block);
    const int64_t after = first + block;
    const void* next = after < groups ? static_cast<const char*>(p.panel) + after * kBytes : p.next;
    const Ahead ahead = share_of(next, block * kBytes, tiles * block * Unpacked<Kind>::kParts, 0, 1);
    TileStrip<Kind>(weights, block, ahead).run(p.x + first, groups, tiles, p.acc);
  }
  if (tiles * kTileRows >= p.rows) return;
  IntegerProduct rest = p;
  rest.x += tiles * groups;
  rest.acc += tiles * kTileRows * kPanelColumns;
  rest.rows -= tiles * kTileRows;
  avx512::kTable.integer_product(rest);
}

// ---- bfloat16 weights and floats

constexpr int kPairs = kGroup / 2;
constexpr int64_t kLineBytes = kPanelColumns * sizeof(uint32_t);  // of a pair of k in a panel
constexpr int64_t kStepBytes = kPairs * kLineBytes;
constexpr int64_t kAccBytes = kPanelColumns * sizeof(float);

// Sums += a piece of one or two tiles of x times the weights loaded. `x_tile`: from one tile of x to the other.
template <int Tiles>
TWINPLANE_INLINE inline void multiply_piece(const SplitTile* x, int64_t x_tile, int piece) {
  _tile_loadd(4, x->pieces[piece], 2 * kGroup);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (Tiles == 2) {
    _tile_loadd(5, x[x_tile].pieces[piece], 2 * kGroup);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// One or two tiles of x times a panel, whose lines are tiles already. After it has asked up to
// `turn`, it asks for the next panel.
template <int Tiles>
[[gnu::noinline]] void pair_strip(const PanelProduct& p, const SplitTile* x, int64_t x_tile, float* acc, Ahead ahead,
                                  const char* turn) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Tiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const char* weights = static_cast<const char*>(p.panel);
  for (int64_t k = 0; k < p.depth; k += kGroup, ++x, weights += kStepBytes, ahead.from += ahead.bytes) {
    if (ahead.from == turn) ahead.from = static_cast<const char*>(p.next);
    for (int64_t i = 0; i < ahead.bytes; i += 64) __builtin_prefetch(ahead.from + i);
    _tile_loadd(6, weights, kLineBytes);
    _tile_loadd(7, weights + 64, kLineBytes);
    multiply_piece<Tiles>(x, x_tile, 2);
    multiply_piece<Tiles>(x, x_tile, 1);
    multiply_piece<Tiles>(x, x_tile, 0);
  }
  _tile_stored(0, acc, kAccBytes);
  _tile_stored(1, acc + 16, kAccBytes);
  if constexpr (Tiles == 2) {
    _tile_stored(2, acc + kTileRows * kPanelColumns, kAccBytes);
    _tile_stored(3, acc + kTileRows * kPanelColumns + 16, kAccBytes);
  }
}

void pair_product(const PanelProduct& p) {
  const int64_t steps = (p.depth + kGroup - 1) / kGroup;
  const int64_t tiles = (p.rows + kTileRows - 1) / kTileRows;
  const int64_t strips = (tiles + 1) / 2;
  shape_tiles({p.rows < kTileRows ? p.rows : kTileRows, 2 * kGroup, kPairs});
  memory_is_tiles();
  for (int64_t i = 0; i < strips; ++i) {
    const int64_t tile = 2 * i;
    const char* panel = static_cast<const char*>(p.panel);
    const Ahead ahead = strips == 1 ? Ahead{panel + kPrefetchBytes, kStepBytes}
                                    : share_of(p.next, steps * kStepBytes, steps, i, strips);
    const auto strip = tile + 1 < tiles ? pair_strip<2> : pair_strip<1>;
    strip(p, p.split + tile * steps, steps, p.acc + tile * kTileRows * kPanelColumns, ahead,
          panel + steps * kStepBytes);
  }
  memory_is_tiles();
}

}  // namespace

void panel_product(const PanelProduct& p) {
  if (p.kind == WeightKind::kBfloat16) return pair_product(p);
  avx512::kTable.panel_product(p);
}

void integer_product(const IntegerProduct& p) {
  with_quantized(p.kind, [&](auto kind) { tile_product<kind.value>(p); });
}

// Else every switch of threads saves 8 KiB.
void after_job() {
  if (shape == Shape{}) return;
  _tile_release();
  shape = {};
}

void split_activations(const float* x, int64_t x_stride, int64_t rows, int64_t depth, SplitTile* out) {
  const __m512i upper_half = _mm512_set1_epi32(INT32_MIN >> 15);
  for (int64_t k = 0; k < depth; k += kGroup, ++out) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* values = x + r * x_stride + k;
      F16 left[2] = {F16::load_first(values, depth - k), F16::zero()};
      if (depth - k > 16) left[1] = F16::load_first(values + 16, depth - k - 16);
      unroll<kPieces>([&](auto piece) TWINPLANE_INLINE {
        unroll<2>([&](auto half) TWINPLANE_INLINE {
          const __m512i bits = _mm512_and_si512(_mm512_castps_si512(left[half.value].v), upper_half);
          left[half.value] = left[half.value] - F16{_mm512_castsi512_ps(bits)};  // exact
          _mm256_store_si256(reinterpret_cast<__m256i*>(out->pieces[piece.value][r] + 16 * half.value),
                             _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
        });
      });
    }
  }
}

}  // namespace twinplane::kernels::amx

#include "kernels/cpu/attention_amx.inl"
