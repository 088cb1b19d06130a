// Exponentials. Included by each isa_*.cpp before what uses them.

namespace twinplane::kernels::TWINPLANE_ISA {

// e^x to about 1 unit in the last place: x = n ln 2 + f with |f| <= ln 2 / 2, e^f by its Taylor polynomial of degree 7.
// exp(0) is exactly 1; below -87.3 the result is about 1e-38; NaN stays NaN.
inline F16 exp(F16 x) {
  const F16 clamped = F16::broadcast(-87.3f).max(F16::broadcast(88.7f).min(x));
  const F16 n = (clamped * F16::broadcast(1.44269504f)).round();
  F16 f = clamped.plus_product(
      n, F16::broadcast(-0.693359375f));  // ln 2 in two parts: the first has 10 bits, n * it is exact
  f = f.plus_product(n, F16::broadcast(2.12194440e-4f));
  F16 p = F16::broadcast(1.0f / 5040);
  p = F16::broadcast(1.0f / 720).plus_product(p, f);
  p = F16::broadcast(1.0f / 120).plus_product(p, f);
  p = F16::broadcast(1.0f / 24).plus_product(p, f);
  p = F16::broadcast(1.0f / 6).plus_product(p, f);
  p = F16::broadcast(0.5f).plus_product(p, f);
  p = F16::broadcast(1.0f).plus_product(p, f);
  p = F16::broadcast(1.0f).plus_product(p, f);
  return p.scale_by_power(n);
}

// x[i] -> 2^x[i] to 2 units in the last place, for x < 128: x = n + f with |f| <= 1 / 2, 2^f by a polynomial fitted to
// it (relative error 1e-7) that is 1 at 0. Below -126 it may be 2^-126; NaN stays NaN. Several at a time: one alone is
// a chain of operations so long that the processor sees no other work beside it.
template <int N>
TWINPLANE_INLINE inline void powers_of_two(F16 (&x)[N]) {
  F16 n[N];
  F16 p[N];
  unroll<N>([&](auto i) TWINPLANE_INLINE { n[i.value] = x[i.value].round(); });
  unroll<N>([&](auto i) TWINPLANE_INLINE { x[i.value] = x[i.value] - n[i.value]; });
  unroll<N>([&](auto i) TWINPLANE_INLINE { p[i.value] = F16::broadcast(0.0013264727f); });
  const auto next = [&](float coefficient) TWINPLANE_INLINE {
    unroll<N>([&](auto i)
                  TWINPLANE_INLINE { p[i.value] = F16::broadcast(coefficient).plus_product(p[i.value], x[i.value]); });
  };
  next(0.009671513f);
  next(0.055507336f);
  next(0.24022242f);
  next(0.693147f);
  next(1);
  unroll<N>([&](auto i) TWINPLANE_INLINE { x[i.value] = p[i.value].scale_by_power(n[i.value]); });
}

inline float power_of_two(float x) {
  F16 powers[1] = {F16::broadcast(x)};
  powers_of_two(powers);
  float lanes[16];
  powers[0].store(lanes);
  return lanes[0];
}

inline float exp(float x) {
  float lanes[16];
  exp(F16::broadcast(x)).store(lanes);
  return lanes[0];
}

// 1 - 2 / (e^2x + 1): absolute error about 1e-7.
inline F16 tanh(F16 x) {
  const F16 one = F16::broadcast(1);
  return one - F16::broadcast(2) / (exp(x + x) + one);
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
