// Panel products of any kind, and their epilogues. Included by each isa_*.cpp after dense.inl and quantized.inl.

namespace twinplane::kernels::TWINPLANE_ISA {

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
    case WeightKind::kQ4_K:
      return quantized_product<WeightKind::kQ4_K>(p);
    case WeightKind::kQ5_K:
      return quantized_product<WeightKind::kQ5_K>(p);
    case WeightKind::kQ6_K:
      return quantized_product<WeightKind::kQ6_K>(p);
  }
}

void integer_product(const IntegerProduct& p) {
  switch (p.kind) {
    case WeightKind::kQ8_0:
      return integer_strips<WeightKind::kQ8_0>(p);
    case WeightKind::kQ4_0:
      return integer_strips<WeightKind::kQ4_0>(p);
    case WeightKind::kQ4_1:
      return integer_strips<WeightKind::kQ4_1>(p);
    case WeightKind::kQ4_K:
      return integer_strips<WeightKind::kQ4_K>(p);
    case WeightKind::kQ5_K:
      return integer_strips<WeightKind::kQ5_K>(p);
    case WeightKind::kQ6_K:
      return integer_strips<WeightKind::kQ6_K>(p);
    case WeightKind::kFloat32:
    case WeightKind::kBfloat16:
      return;  // not quantized: nobody asks
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
