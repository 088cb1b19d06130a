// Panel products of quantized weights (formats.hpp). Included by each isa_*.cpp after dense.inl and
// quantized_group.inl.
//
// Two ways. panel_product computes in floats with exactly the weights that gguf.dequantize gives, in the same chain of
// multiply-adds over K as dense.inl. integer_product takes x in groups of int8 and multiplies numbers by numbers; only
// the sums are scaled.

namespace twinplane::kernels::TWINPLANE_ISA {

template <int Rows, WeightKind Kind>
[[gnu::noinline]] void quantized_strip(const PanelProduct& p) {
  F16 c[Rows][kPanelVectors];
  load_accumulators<Rows>(c, p.acc, true);
  for (int64_t g = 0; g < p.depth / kGroup; ++g) {
    const QuantizedGroup<Kind> group(static_cast<const uint8_t*>(p.panel), g);
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
    const QuantizedGroup<Kind> group(static_cast<const uint8_t*>(panel), first + g);
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
  for (int64_t k0 = 0; k0 < p.depth; k0 += kDepthBlock) {
    const int64_t depth = p.depth - k0 < kDepthBlock ? p.depth - k0 : kDepthBlock;
    unpack<Kind>(p.panel, k0 / kGroup, depth / kGroup, p.unpacked);
    dense_strips(p.unpacked, depth, p, k0);
  }
}

// ---- integers

template <int Rows, WeightKind Kind>
[[gnu::noinline]] void integer_strip(const IntegerProduct& p, const ActivationGroup* x, float* acc) {
  using Group = QuantizedGroup<Kind>;
  using Sums = Dot<Group::kGreatest, Group::kSigned>;
  constexpr int32_t kOffset = Group::kFormat.offset + Sums::kOffset;
  for (int64_t g = 0; g < p.depth / kGroup; ++g) {
    const Group group(static_cast<const uint8_t*>(p.panel), g);
    const ActivationRows<Rows> rows(x + g, p.x_stride);
    unroll<Group::kParts>([&](auto part) TWINPLANE_INLINE {
      Sums c[Rows][kPanelVectors];
      unroll<Rows>([&](auto r) TWINPLANE_INLINE {
        unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE { c[r.value][v.value] = Sums::zero(); });
      });
      group.template for_quads<part.value>([&](int64_t t, const Words(&numbers)[kPanelVectors]) TWINPLANE_INLINE {
        unroll<Rows>([&](auto r) TWINPLANE_INLINE {
          const Words quad = Words::broadcast(rows.group(r).numbers + 4 * t);
          unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE { c[r.value][v.value].add(numbers[v.value], quad); });
        });
      });
      unroll<Rows>([&](auto r) TWINPLANE_INLINE {
        const ActivationGroup& a = rows.group(r);
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
  const int64_t strips = (p.rows + kIntegerRows - 1) / kIntegerRows;
  for (int64_t i = 0, row = 0; i < strips; ++i) {
    const int64_t rows = (p.rows - row + strips - i - 1) / (strips - i);
    with_rows<kIntegerRows>(rows, [&](auto r) TWINPLANE_INLINE {
      integer_strip<r.value, Kind>(p, p.x + row * p.x_stride, p.acc + row * kPanelColumns);
    });
    row += rows;
  }
}

void quantize_activations(const float* x, int64_t depth, ActivationGroup* out) {
  for (int64_t k = 0; k < depth; k += kGroup, ++out) {
    const F16 a[2] = {F16::load(x + k), F16::load(x + k + 16)};
    F16 greatest = F16::zero();
    for (const F16& part : a) greatest = greatest.max(part).max(F16::zero() - part);
    const float magnitude = greatest.greatest();
    const bool finite = !((a[0] - a[0]).has_nan() || (a[1] - a[1]).has_nan());
    const bool zero = magnitude < 1e-30f;
    out->scale = !finite ? ::nanf("") : zero ? 0 : magnitude / 127;
    const F16 factor = F16::broadcast(zero || !finite ? 0 : 127 / magnitude);
    for (int part = 0; part < 2; ++part) {
      const F16 numbers = finite ? (a[part] * factor).round() : F16::zero();
      numbers.store_int8(out->numbers + 16 * part);
      out->sums[part] = static_cast<int32_t>(numbers.sum());  // exact in floats
    }
    out->weighted_sum = out->scale * static_cast<float>(out->sums[0] + out->sums[1]);
  }
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
