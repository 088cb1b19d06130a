// Panel products of any kind, and their epilogues. Included by each isa_*.cpp after dense.inl and quantized.inl.

namespace twinplane::kernels::TWINPLANE_ISA {

void panel_product(const PanelProduct& p) {
  if (p.kind == WeightKind::kFloat32) return dense_product<float>(p);
  if (p.kind == WeightKind::kBfloat16) return dense_product<Bf16>(p);
  with_quantized(p.kind, [&](auto kind) { quantized_product<kind.value>(p); });
}

void integer_product(const IntegerProduct& p) {
  with_quantized(p.kind, [&](auto kind) { integer_strips<kind.value>(p); });
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
