// Panel products of plain numbers. Included by each isa_*.cpp after its simd_*.hpp.
//
// A panel holds kPanelColumns consecutive output columns of float32 or bfloat16, k-major: [K][columns]. (Where
// isa_amx.cpp multiplies bfloat16, pairs of k: [ceil(K / 32) 16][columns][2], zeros beyond K.)
//
// Registers hold the sums of a strip of rows x one panel. The accumulators are arrays indexed by constants only
// (unroll), so that the compiler keeps them in registers; tests/kernels/test_cpu_codegen.py checks that it did.

namespace twinplane::kernels::TWINPLANE_ISA {

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

// Asks for so many bytes at each k.
template <int Rows, int64_t Bytes, class Weight>
[[gnu::noinline]] void dense_strip(const Weight* w, int64_t depth, const float* x, int64_t x_stride, float* acc,
                                   bool first, Ahead ahead) {
  F16 c[Rows][kPanelVectors];
  load_accumulators<Rows>(c, acc, first);
  const StripRows<Rows> rows(x, x_stride);
  for (int64_t k = 0; k < depth; ++k) {
    F16 line[kPanelVectors];
    prefetch<Bytes>(ahead.from + k * ahead.bytes);
    unroll<kPanelVectors>([&](auto v)
                              TWINPLANE_INLINE { line[v.value] = F16::load(w + k * kPanelColumns + v.value * 16); });
    multiply_add<Rows>(c, line, rows, k);
  }
  store_accumulators<Rows>(c, acc);
}

// K cut evenly into steps of at most kDepthBlock, in whole groups.
inline int64_t depth_step(int64_t depth) {
  const int64_t steps = (depth + kDepthBlock - 1) / kDepthBlock;
  return ((depth + steps - 1) / steps + kGroup - 1) / kGroup * kGroup;
}

// All rows over k in [0, depth) of a panel of floats, strip by strip. Afterwards come `bytes` at `next`.
template <class Weight>
void dense_strips(const Weight* w, int64_t depth, const PanelProduct& p, int64_t k0, const void* next, int64_t bytes) {
  const int64_t strips = (p.rows + kStripRows - 1) / kStripRows;
  for (int64_t i = 0, row = 0; i < strips; ++i) {
    const int64_t rows = (p.rows - row + strips - i - 1) / (strips - i);
    with_rows<kStripRows>(rows, [&](auto r) TWINPLANE_INLINE {
      dense_strip<r.value, 64>(w, depth, p.x + row * p.x_stride + k0, p.x_stride, p.acc + row * kPanelColumns, k0 == 0,
                               share_of(next, bytes, depth, i, strips));
    });
    row += rows;
  }
}

// One strip of rows over a whole panel.
template <class Weight>
void dense_line(const Weight* w, const PanelProduct& p) {
  constexpr int64_t kLine = kPanelColumns * sizeof(Weight);
  const int64_t last = p.depth < kPrefetchBytes / kLine ? 0 : p.depth - kPrefetchBytes / kLine;
  with_rows<kStripRows>(p.rows, [&](auto r) TWINPLANE_INLINE {
    dense_strip<r.value, kLine>(w, last, p.x, p.x_stride, p.acc, true,
                                {reinterpret_cast<const char*>(w) + kPrefetchBytes, kLine});
    dense_strip<r.value, kLine>(w + last * kPanelColumns, p.depth - last, p.x + last, p.x_stride, p.acc, false,
                                {static_cast<const char*>(p.next), kLine});
  });
}

template <class Weight>
void dense_product(const PanelProduct& p) {
  const Weight* w = static_cast<const Weight*>(p.panel);
  if (p.rows <= kStripRows) return dense_line(w, p);
  const int64_t step = depth_step(p.depth);
  for (int64_t k0 = 0; k0 < p.depth; k0 += step) {
    const int64_t end = k0 + step < p.depth ? k0 + step : p.depth;
    const void* next = end < p.depth ? w + end * kPanelColumns : p.next;
    dense_strips(w + k0 * kPanelColumns, end - k0, p, k0, next, step * kPanelColumns * sizeof(Weight));
  }
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
