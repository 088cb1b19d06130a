// Weights of the tokens of one row. Included by isa.inl after elementwise.inl.

namespace twinplane::kernels::TWINPLANE_ISA {

int64_t weigh(const Weighing& w, double* total) {
  constexpr int64_t kBlock = 64;  // tokens looked at together: most blocks hold none that is likely
  const F16 lowest = F16::broadcast(-HUGE_VALF);
  const F16 peak = F16::broadcast(w.peak);
  const F16 inverse_temperature = F16::broadcast(w.inverse_temperature);
  int64_t count = 0;
  double sum = 0;
  for (int64_t start = 0; start < w.vocab; start += kBlock) {
    F16 x[4];
    F16 greatest = lowest;
    unroll<4>([&](auto v) TWINPLANE_INLINE {
      const int64_t i = start + v.value * 16;
      x[v.value] = i < w.vocab ? load_at(w.logits, i, w.vocab).keep(0, w.vocab - i, lowest) : lowest;
      greatest = greatest.max(x[v.value]);
    });
    if (total == nullptr && !greatest.reaches(w.skip_below)) continue;
    unroll<4>([&](auto v) TWINPLANE_INLINE { x[v.value] = exp((x[v.value] - peak) * inverse_temperature); });
    if (total != nullptr) sum += static_cast<double>(((x[0] + x[1]) + (x[2] + x[3])).sum());
    if (!x[0].max(x[1]).max(x[2].max(x[3])).reaches(w.threshold)) continue;
    float weights[kBlock];
    unroll<4>([&](auto v) TWINPLANE_INLINE { x[v.value].store(weights + v.value * 16); });
    const int64_t end = w.vocab - start < kBlock ? w.vocab - start : kBlock;
    for (int64_t i = 0; i < end; ++i) {  // without branches: there is always room for one more
      w.keys[count] = weight_key(weights[i], start + i);
      count += weights[i] >= w.threshold ? 1 : 0;
    }
  }
  if (total != nullptr) *total = sum;
  return count;
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
