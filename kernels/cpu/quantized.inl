// Panel products of quantized weights (formats.hpp). Included by each isa_*.cpp after dense.inl and
// quantized_group.inl.
//
// Two ways. panel_product computes in floats with exactly the weights that gguf.dequantize gives, in the same chain of
// multiply-adds over K as dense.inl. integer_product takes x in groups of int8 and multiplies numbers by numbers; only
// the sums are scaled.

namespace twinplane::kernels::TWINPLANE_ISA {

// How far ahead a strip of rows asks, group by group of a panel. The first one: in it, and from group `turn` on at the
// start of the next one. Others, for which the panel is there already (`turn` 0): in the next one.
template <WeightKind Kind>
class Distance {
 public:
  static Distance first(const void* panel, const void* next, int64_t groups) {
    return {panel, next, groups - kPrefetchBytes / kBytes};
  }
  static Distance other(const void* panel, const void* next) { return {panel, next, 0}; }

  int64_t at(int64_t g) const { return g < turn_ ? kPrefetchBytes : to_next_; }

 private:
  static constexpr int64_t kBytes = QuantizedGroup<Kind>::kBytes;

  Distance(const void* panel, const void* next, int64_t turn)
      : turn_(turn), to_next_(reinterpret_cast<intptr_t>(next) - reinterpret_cast<intptr_t>(panel) - turn * kBytes) {}

  int64_t turn_;
  int64_t to_next_;
};

template <int Rows, WeightKind Kind>
[[gnu::noinline]] void quantized_strip(const PanelProduct& p) {
  F16 c[Rows][kPanelVectors];
  load_accumulators<Rows>(c, p.acc, true);
  const int64_t groups = p.depth / kGroup;
  const auto distance = Distance<Kind>::first(p.panel, p.next, groups);
  for (int64_t g = 0; g < groups; ++g) {
    const QuantizedGroup<Kind> group(p.panel, g, distance.at(g));
    const StripRows<Rows> rows(p.x + g * kGroup, p.x_stride);
    group.for_lines([&](int64_t k, const F16(&line)[kPanelVectors])
                        TWINPLANE_INLINE { multiply_add<Rows>(c, line, rows, k); });
  }
  store_accumulators<Rows>(c, p.acc);
}

// Groups [first, first + groups) as floats, line by line.
template <WeightKind Kind>
void unpack(const void* panel, int64_t first, int64_t groups, float* out) {
  for (int64_t g = 0; g < groups; ++g, out += kGroup * kPanelColumns) {
    const QuantizedGroup<Kind> group(panel, first + g, kPrefetchBytes);
    group.for_lines([&](int64_t k, const F16(&line)[kPanelVectors]) TWINPLANE_INLINE {
      unroll<kPanelVectors>([&](auto v)
                                TWINPLANE_INLINE { line[v.value].store(out + k * kPanelColumns + v.value * 16); });
    });
  }
}

template <WeightKind Kind>
void quantized_product(const PanelProduct& p) {
  if (p.rows <= kUnpackRows) {
    return with_rows<kUnpackRows>(p.rows, [&](auto r) TWINPLANE_INLINE { quantized_strip<r.value, Kind>(p); });
  }
  const int64_t step = depth_step(p.depth);
  constexpr int64_t kBytes = QuantizedGroup<Kind>::kBytes;
  for (int64_t k0 = 0; k0 < p.depth; k0 += step) {
    const int64_t end = k0 + step < p.depth ? k0 + step : p.depth;
    unpack<Kind>(p.panel, k0 / kGroup, (end - k0) / kGroup, p.unpacked);
    const void* next = end < p.depth ? static_cast<const char*>(p.panel) + end / kGroup * kBytes : p.next;
    dense_strips(p.unpacked, end - k0, p, k0, next, step / kGroup * kBytes);
  }
}

// ---- integers

// Rows first .. first + Rows - 1 of a tile of x.
template <int Rows, WeightKind Kind>
[[gnu::noinline]] void integer_strip(const IntegerProduct& p, const ActivationTile* x, int64_t first, float* acc,
                                     Distance<Kind> distance) {
  using Group = QuantizedGroup<Kind>;
  using Sums = Dot<Group::kGreatest, Group::kSigned>;
  constexpr int32_t kOffset = Group::kFormat.offset + Sums::kOffset;
  for (int64_t g = 0; g < p.depth / kGroup; ++g) {
    const Group group(p.panel, g, distance.at(g));
    unroll<Group::kParts>([&](auto part) TWINPLANE_INLINE {
      Sums c[Rows][kPanelVectors];
      unroll<Rows>([&](auto r) TWINPLANE_INLINE {
        unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE { c[r.value][v.value] = Sums::zero(); });
      });
      group.template for_quads<part.value, (Rows > 3)>(
          [&](int64_t t, const Words(&numbers)[kPanelVectors]) TWINPLANE_INLINE {
            unroll<Rows>([&](auto r) TWINPLANE_INLINE {
              const Words quad = Words::broadcast(x[g].numbers[first + r.value] + 4 * t);
              unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE { c[r.value][v.value].add(numbers[v.value], quad); });
            });
          });
      unroll<Rows>([&](auto r) TWINPLANE_INLINE {
        const ActivationTile::Row& a = x[g].rows[first + r.value];
        const int32_t sum = Group::kParts == 1 ? a.sums[0] + a.sums[1] : a.sums[part.value];
        unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE {
          float* out = acc + r.value * kPanelColumns + v.value * 16;
          const F16 scale = group.scale[part.value][v.value] * F16::broadcast(a.scale);
          F16 total = F16::load(out).plus_product(c[r.value][v.value].minus(kOffset * sum), scale);
          if constexpr (Group::kMinimum) {
            total = total.plus_product(group.minimum[v.value], F16::broadcast(a.weighted_sum));
          }
          total.store(out);
        });
      });
    });
  }
}

template <WeightKind Kind>
void integer_strips(const IntegerProduct& p) {
  for (int64_t i = 0; i < p.rows * kPanelColumns; i += 16) F16::zero().store(p.acc + i);
  auto distance = Distance<Kind>::first(p.panel, p.next, p.depth / kGroup);
  for (int64_t tile = 0; tile * kTileRows < p.rows; ++tile) {
    const int64_t left = p.rows - tile * kTileRows;
    const int64_t tile_rows = left < kTileRows ? left : kTileRows;
    const int64_t strips = (tile_rows + kIntegerRows - 1) / kIntegerRows;
    for (int64_t i = 0, row = 0; i < strips; ++i) {
      const int64_t rows = (tile_rows - row + strips - i - 1) / (strips - i);
      with_rows<kIntegerRows>(rows, [&](auto r) TWINPLANE_INLINE {
        integer_strip<r.value, Kind>(p, p.x + tile * (p.depth / kGroup), row,
                                     p.acc + (tile * kTileRows + row) * kPanelColumns, distance);
      });
      distance = Distance<Kind>::other(p.panel, p.next);
      row += rows;
    }
  }
}

void quantize_activations(const float* x, int64_t x_stride, int64_t rows, int64_t depth, ActivationTile* out) {
  for (int64_t k = 0; k < depth; k += kGroup, ++out) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* values = x + r * x_stride + k;
      const F16 a[2] = {F16::load(values), F16::load(values + 16)};
      const float magnitude = F16::greatest_magnitude(a[0], a[1]);
      const bool finite = magnitude - magnitude == 0;
      const bool zero = magnitude < 1e-30f;
      const F16 factor = F16::broadcast(zero || !finite ? 0 : 127 / magnitude);
      ActivationTile::Row& row = out->rows[r];
      row.scale = !finite ? ::nanf("") : zero ? 0 : magnitude / 127;
      for (int part = 0; part < 2; ++part) {
        const F16 numbers = finite ? (a[part] * factor).round() : F16::zero();
        row.sums[part] = numbers.store_int8(out->numbers[r] + 16 * part);
      }
      row.weighted_sum = row.scale * static_cast<float>(row.sums[0] + row.sums[1]);
    }
    for (int64_t r = rows; r < kTileRows; ++r) out->rows[r] = {};
  }
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
