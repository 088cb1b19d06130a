// Loops whose index is a constant of the type system. Included by each isa_*.cpp first.
//
// GCC keeps an array of vectors in registers only if every index is a constant when it takes arrays apart, which is
// before it unrolls loops. So loops over accumulators are unrolled by templates.

namespace twinplane::kernels::TWINPLANE_ISA {

template <int I>
struct Index {
  static constexpr int value = I;
};

#define TWINPLANE_INLINE __attribute__((always_inline))

// body(Index<0>{}), body(Index<1>{}), ... body(Index<N - 1>{})
template <int N, class Body>
TWINPLANE_INLINE inline void unroll(const Body& body) {
  if constexpr (N > 0) {
    unroll<N - 1>(body);
    body(Index<N - 1>{});
  }
}

// rows = 1 .. Max as a compile-time constant.
template <int Max, class Body>
TWINPLANE_INLINE inline void with_rows(int64_t rows, const Body& body) {
  if constexpr (Max > 1) {
    if (rows < Max) return with_rows<Max - 1>(rows, body);
  }
  body(Index<Max>{});
}

// The base pointers of a strip's rows, three rows to a pointer: x86 addresses base, base + stride and base + 2 stride
// without another register.
template <int Rows>
struct StripRows {
  const float* base[(Rows + 2) / 3];
  int64_t stride;

  TWINPLANE_INLINE StripRows(const float* x, int64_t x_stride) : stride(x_stride) {
    unroll<(Rows + 2) / 3>([&](auto i) TWINPLANE_INLINE { base[i.value] = x + 3 * i.value * x_stride; });
  }
  template <int R>
  TWINPLANE_INLINE F16 at(Index<R>, int64_t k) const {
    return F16::broadcast(base[R / 3][(R % 3) * stride + k]);
  }
};

}  // namespace twinplane::kernels::TWINPLANE_ISA
