// Panel products and their epilogues. Included by each isa_*.cpp after its simd_*.hpp.
//
// A panel holds kPanelColumns consecutive output columns, k-major:
//   float32, bfloat16   [K][columns]
//   Q8_0                [K / 32] { half d[columns];                     int8  q[32][columns]     }
//   Q4_0                [K / 32] { half d[columns];                     uint8 q[32][columns / 2] }
//   Q4_1                [K / 32] { half d[columns]; half m[columns];    uint8 q[32][columns / 2] }
// where byte i of a 4-bit line holds column i in its low and column i + columns / 2 in its high half.
//
// Registers hold the sums of a strip of rows x one panel. The accumulators are arrays indexed by constants only
// (unroll), so that the compiler keeps them in registers; tests/kernels/test_codegen.py checks that it did.

namespace twinplane::kernels::TWINPLANE_ISA {

inline constexpr int kPanelColumns = kPanelVectors * 16;
static_assert(kPanelColumns <= kMaxPanelColumns && kDepthBlock % kGroup == 0);
static_assert(kStripRows * kPanelVectors + kPanelVectors + 1 <= kRegisters, "sums, a line of weights, one x");

template <int Rows>
TWINPLANE_INLINE inline void load_accumulators(F16 (&c)[Rows][kPanelVectors], const float* acc, bool first) {
  unroll<Rows>([&](auto r) TWINPLANE_INLINE {
    unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE {
      c[r.value][v.value] = first ? F16::zero() : F16::load(acc + r.value * kPanelColumns + v.value * 16);
    });
  });
}

template <int Rows>
TWINPLANE_INLINE inline void store_accumulators(const F16 (&c)[Rows][kPanelVectors], float* acc) {
  unroll<Rows>([&](auto r) TWINPLANE_INLINE {
    unroll<kPanelVectors>(
        [&](auto v) TWINPLANE_INLINE { c[r.value][v.value].store(acc + r.value * kPanelColumns + v.value * 16); });
  });
}

template <int Rows>
TWINPLANE_INLINE inline void multiply_add(F16 (&c)[Rows][kPanelVectors], const F16 (&w)[kPanelVectors],
                                          const StripRows<Rows>& x, int64_t k) {
  unroll<Rows>([&](auto r) TWINPLANE_INLINE {
    const F16 a = x.at(r, k);
    unroll<kPanelVectors>(
        [&](auto v) TWINPLANE_INLINE { c[r.value][v.value] = c[r.value][v.value].plus_product(a, w[v.value]); });
  });
}

// Weights come from memory in one long line; ask for what is needed this much later. (Past the end it asks in vain,
// which is harmless.)
inline constexpr int64_t kPrefetchBytes = 4096;

template <int64_t Bytes>
TWINPLANE_INLINE inline void prefetch(const void* p) {
  const char* line = static_cast<const char*>(p) + kPrefetchBytes;
  unroll<static_cast<int>((Bytes + 63) / 64)>([&](auto i)
                                                  TWINPLANE_INLINE { __builtin_prefetch(line + 64 * i.value); });
}

template <int Rows, class Weight>
[[gnu::noinline]] void dense_strip(const Weight* w, int64_t depth, const float* x, int64_t x_stride, float* acc,
                                   bool first) {
  F16 c[Rows][kPanelVectors];
  load_accumulators<Rows>(c, acc, first);
  const StripRows<Rows> rows(x, x_stride);
  for (int64_t k = 0; k < depth; ++k) {
    F16 line[kPanelVectors];
    prefetch<kPanelColumns * sizeof(Weight)>(w + k * kPanelColumns);
    unroll<kPanelVectors>([&](auto v)
                              TWINPLANE_INLINE { line[v.value] = F16::load(w + k * kPanelColumns + v.value * 16); });
    multiply_add<Rows>(c, line, rows, k);
  }
  store_accumulators<Rows>(c, acc);
}

// One group of 32 weights per column: scales once, then line by line exactly the values gguf.dequantize gives.
template <WeightKind Kind>
struct QuantizedGroup {
  static constexpr bool kHasMinimum = Kind == WeightKind::kQ4_1;
  static constexpr int64_t kScaleBytes = kPanelColumns * 2 * (kHasMinimum ? 2 : 1);
  static constexpr int64_t kLineBytes = Kind == WeightKind::kQ8_0 ? kPanelColumns : kPanelColumns / 2;
  static constexpr int64_t kBytes = kScaleBytes + kGroup * kLineBytes;

  F16 scale[kPanelVectors];
  F16 minimum[kPanelVectors];
  const uint8_t* lines;

  TWINPLANE_INLINE explicit QuantizedGroup(const uint8_t* group) : lines(group + kScaleBytes) {
    prefetch<kBytes>(group);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(group);
    unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE {
      scale[v.value] = F16::load_half(halves + v.value * 16);
      if constexpr (kHasMinimum) minimum[v.value] = F16::load_half(halves + kPanelColumns + v.value * 16);
    });
  }

  TWINPLANE_INLINE void line(int64_t k, F16 (&out)[kPanelVectors]) const {
    F16 q[kPanelVectors];
    if constexpr (Kind == WeightKind::kQ8_0) {
      const int8_t* bytes = reinterpret_cast<const int8_t*>(lines + k * kLineBytes);
      unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE { q[v.value] = F16::load_int8(bytes + v.value * 16); });
    } else {
      load_nibbles<Kind == WeightKind::kQ4_0 ? 8 : 0>(lines + k * kLineBytes, q);
    }
    unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE {
      // q * d is exact (at most 19 significant bits), so d * q + m rounds once, with or without fused arithmetic.
      if constexpr (kHasMinimum) {
        out[v.value] = minimum[v.value].plus_product(q[v.value], scale[v.value]);
      } else {
        out[v.value] = q[v.value] * scale[v.value];
      }
    });
  }
};

template <int Rows, WeightKind Kind>
[[gnu::noinline]] void quantized_strip(const uint8_t* w, int64_t depth, const float* x, int64_t x_stride, float* acc) {
  F16 c[Rows][kPanelVectors];
  load_accumulators<Rows>(c, acc, true);
  for (int64_t k0 = 0; k0 < depth; k0 += kGroup, w += QuantizedGroup<Kind>::kBytes) {
    const QuantizedGroup<Kind> group(w);
    const StripRows<Rows> rows(x + k0, x_stride);
    for (int64_t k = 0; k < kGroup; ++k) {
      F16 line[kPanelVectors];
      group.line(k, line);
      multiply_add<Rows>(c, line, rows, k);
    }
  }
  store_accumulators<Rows>(c, acc);
}

// All rows over k in [0, depth) of a panel of floats, strip by strip.
template <class Weight>
void dense_strips(const Weight* w, int64_t depth, const PanelProduct& p, int64_t k0) {
  const int64_t strips = (p.rows + kStripRows - 1) / kStripRows;
  for (int64_t i = 0, row = 0; i < strips; ++i) {
    const int64_t rows = (p.rows - row + strips - i - 1) / (strips - i);
    with_rows<kStripRows>(rows, [&](auto r) TWINPLANE_INLINE {
      dense_strip<r.value>(w, depth, p.x + row * p.x_stride + k0, p.x_stride, p.acc + row * kPanelColumns, k0 == 0);
    });
    row += rows;
  }
}

template <WeightKind Kind>
void unpack(const uint8_t* groups, int64_t depth, float* out) {
  for (int64_t k0 = 0; k0 < depth; k0 += kGroup, groups += QuantizedGroup<Kind>::kBytes) {
    const QuantizedGroup<Kind> group(groups);
    for (int64_t k = 0; k < kGroup; ++k, out += kPanelColumns) {
      F16 line[kPanelVectors];
      group.line(k, line);
      unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE { line[v.value].store(out + v.value * 16); });
    }
  }
}

template <WeightKind Kind>
void quantized_product(const PanelProduct& p) {
  const uint8_t* w = static_cast<const uint8_t*>(p.panel);
  if (p.rows <= kUnpackRows) {
    return with_rows<kUnpackRows>(
        p.rows, [&](auto r) TWINPLANE_INLINE { quantized_strip<r.value, Kind>(w, p.depth, p.x, p.x_stride, p.acc); });
  }
  for (int64_t k0 = 0; k0 < p.depth; k0 += kDepthBlock) {
    const int64_t depth = p.depth - k0 < kDepthBlock ? p.depth - k0 : kDepthBlock;
    unpack<Kind>(w + k0 / kGroup * QuantizedGroup<Kind>::kBytes, depth, p.unpacked);
    dense_strips(p.unpacked, depth, p, k0);
  }
}

template <class Weight>
void dense_product(const PanelProduct& p) {
  const Weight* w = static_cast<const Weight*>(p.panel);
  if (p.rows <= kStripRows) return dense_strips(w, p.depth, p, 0);
  for (int64_t k0 = 0; k0 < p.depth; k0 += kDepthBlock) {
    const int64_t depth = p.depth - k0 < kDepthBlock ? p.depth - k0 : kDepthBlock;
    dense_strips(w + k0 * kPanelColumns, depth, p, k0);
  }
}

void panel_product(const PanelProduct& p) {
  switch (p.kind) {
    case WeightKind::kFloat32:
      return dense_product<float>(p);
    case WeightKind::kBfloat16:
      return dense_product<Bf16>(p);
    case WeightKind::kQ8_0:
      return quantized_product<WeightKind::kQ8_0>(p);
    case WeightKind::kQ4_0:
      return quantized_product<WeightKind::kQ4_0>(p);
    case WeightKind::kQ4_1:
      return quantized_product<WeightKind::kQ4_1>(p);
  }
}

// ---- epilogues: 16 columns at a time, the last ones masked

inline F16 load_columns(const float* p, int64_t n) { return n >= 16 ? F16::load(p) : F16::load_first(p, n); }

inline void store_columns(F16 x, float* p, int64_t n) {
  if (n >= 16) {
    x.store(p);
  } else {
    x.store_first(p, n);
  }
}

void linear_epilogue(const LinearEpilogue& e) {
  for (int64_t row = 0; row < e.rows; ++row) {
    for (int64_t c = 0; c < e.columns; c += 16) {
      const int64_t n = e.columns - c;
      F16 y = F16::load(e.acc + row * kPanelColumns + c);
      if (e.bias != nullptr) y = y + load_columns(e.bias + c, n);
      y = activate(y, e.activation);
      if (e.residual != nullptr) y = y + load_columns(e.residual + row * e.residual_stride + c, n);
      store_columns(y, e.out + row * e.out_stride + c, n);
    }
  }
}

void gated_epilogue(const GatedEpilogue& e) {
  for (int64_t row = 0; row < e.rows; ++row) {
    for (int64_t c = 0; c < e.columns; c += 16) {
      const int64_t n = e.columns - c;
      F16 gate = load_columns(e.gate + row * e.acc_stride + c, n);
      F16 up = load_columns(e.up + row * e.acc_stride + c, n);
      if (e.gate_bias != nullptr) gate = gate + load_columns(e.gate_bias + c, n);
      if (e.up_bias != nullptr) up = up + load_columns(e.up_bias + c, n);
      store_columns(activate(gate, e.activation) * up, e.out + row * e.out_stride + c, n);
    }
  }
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
