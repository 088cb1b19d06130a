// Activations, norms, rotation, cache writes, argmax. Included by each isa_*.cpp before the others.

namespace twinplane::kernels::TWINPLANE_ISA {

inline F16 activate(F16 x, Activation activation) {
  const F16 one = F16::broadcast(1);
  const F16 half = F16::broadcast(0.5f);
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return F16::zero().max(x);  // NaN stays NaN
    case Activation::kSilu:
      return x / (one + exp(F16::zero() - x));
    case Activation::kGeluTanh: {  // (1 + tanh z) / 2 = 1 / (1 + e^-2z), which does not cancel
      const F16 z = (x + x * x * x * F16::broadcast(0.044715f)) * F16::broadcast(0.797884561f);
      return x / (one + exp(F16::zero() - (z + z)));
    }
    case Activation::kGelu: {
      float lanes[16];
      (x * F16::broadcast(0.707106781f)).store(lanes);
      for (float& lane : lanes) lane = ::erff(lane);
      return half * x * (one + F16::load(lanes));
    }
  }
  return x;
}

template <class Load>
inline F16 sum_of_squares(const Load& load, int64_t dim) {
  F16 total = F16::zero();
  for (int64_t i = 0; i < dim; i += 16) {
    const F16 x = load(i);
    total = total.plus_product(x, x);
  }
  return total;
}

inline F16 load_at(const float* p, int64_t i, int64_t dim) {
  return dim - i >= 16 ? F16::load(p + i) : F16::load_first(p + i, dim - i);
}

inline void store_at(F16 x, float* p, int64_t i, int64_t dim) {
  if (dim - i >= 16) {
    x.store(p + i);
  } else {
    x.store_first(p + i, dim - i);
  }
}

void rms_norm(const float* x, const float* weight, float eps, float* out, int64_t dim) {
  const F16 squares = sum_of_squares([&](int64_t i) { return load_at(x, i, dim); }, dim);
  const F16 factor = F16::broadcast(1.0f / ::sqrtf(squares.sum() / static_cast<float>(dim) + eps));
  for (int64_t i = 0; i < dim; i += 16) store_at(load_at(x, i, dim) * factor * load_at(weight, i, dim), out, i, dim);
}

void add_rms_norm(const float* x, float* residual, const float* weight, float eps, float* out, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 16) store_at(load_at(x, i, dim) + load_at(residual, i, dim), residual, i, dim);
  rms_norm(residual, weight, eps, out, dim);
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, float* out, int64_t dim) {
  F16 total = F16::zero();
  for (int64_t i = 0; i < dim; i += 16) total = total + load_at(x, i, dim);
  const F16 mean = F16::broadcast(total.sum() / static_cast<float>(dim));
  const auto centred = [&](int64_t i) { return (load_at(x, i, dim) - mean).keep(0, dim - i, F16::zero()); };
  const float variance = sum_of_squares(centred, dim).sum() / static_cast<float>(dim);
  const F16 factor = F16::broadcast(1.0f / ::sqrtf(variance + eps));
  for (int64_t i = 0; i < dim; i += 16) {
    store_at(load_at(bias, i, dim) + centred(i) * factor * load_at(weight, i, dim), out, i, dim);
  }
}

// Per head: norm if any, then pairs (i, i + half) turned by the angle of (cos[i], sin[i]).
void rotary(const RotaryHeads& h) {
  for (int64_t head = 0; head < h.heads; ++head) {
    float* x = h.x + head * h.head_dim;
    if (h.norm != nullptr) rms_norm(x, h.norm, h.eps, x, h.head_dim);
    for (int64_t i = 0; i < h.half; i += 16) {
      const F16 c = load_at(h.cos, i, h.half);
      const F16 s = load_at(h.sin, i, h.half);
      const F16 a = load_at(x, i, h.half);
      const F16 b = load_at(x + h.half, i, h.half);
      store_at(a * c - b * s, x, i, h.half);
      store_at(b * c + a * s, x + h.half, i, h.half);
    }
  }
}

// The power of two of a head (KvType), and the factor that takes its values to numbers.
struct Fp8Scale {
  uint8_t power;
  float factor;
};

inline Fp8Scale fp8_scale(const float* x, int64_t dim) {
  F16 greatest = F16::zero();
  bool finite = true;
  for (int64_t i = 0; i < dim; i += 16) {
    const F16 v = load_at(x, i, dim);
    finite &= !(v - v).has_nan();
    greatest = greatest.max(v).max(F16::zero() - v);
  }
  if (!finite) return {255, 0};
  const uint32_t bits = float_bits(greatest.greatest());
  // In units of 2^(exponent - 8) it is from 256 to 511; more than 448 = 1.75 * 256 takes the next power.
  const int32_t power = static_cast<int32_t>(bits >> 23) - 8 + ((bits & 0x7FFFFFu) > 0x600000u ? 1 : 0);
  if (power < 1) return {0, 0};  // below 1e-35
  return {static_cast<uint8_t>(power), bits_float(static_cast<uint32_t>(254 - power) << 23)};
}

// 0 * NaN is no number, so what is not finite becomes zeros.
inline Fp8 scaled_fp8(float x, Fp8Scale scale) { return scale.factor == 0 ? Fp8{0} : float_to_fp8(x * scale.factor); }

// A key's dims, in pairs, into a tile of 16 keys.
template <class Element, class Convert>
inline void write_key_pairs(const float* key, Element* tile, int64_t lane, int64_t head_dim, const Convert& convert) {
  const int64_t paired = head_dim / 2 * 2;
  for (int64_t d = 0; d < paired; ++d) tile[d / 2 * 32 + 2 * lane + d % 2] = convert(key[d]);
  if (paired < head_dim) tile[paired * 16 + lane] = convert(key[paired]);
}

void write_key(const float* key, void* tile, int64_t lane, int64_t head_dim, KvType type) {
  if (type == KvType::kFp8) {
    Fp8* out = static_cast<Fp8*>(tile);
    const Fp8Scale scale = fp8_scale(key, head_dim);
    write_key_pairs(key, out, lane, head_dim, [&](float x) { return scaled_fp8(x, scale); });
    out[head_dim * 16 + lane] = {scale.power};
  } else if (type == KvType::kBfloat16) {
    write_key_pairs(key, static_cast<Bf16*>(tile), lane, head_dim, float_to_bf16);
  } else {
    float* out = static_cast<float*>(tile) + lane;
    for (int64_t d = 0; d < head_dim; ++d) out[d * 16] = key[d];
  }
}

void write_value(const float* value, void* first, uint8_t* power, int64_t value_dim, KvType type) {
  if (type == KvType::kFp8) {
    const Fp8Scale scale = fp8_scale(value, value_dim);
    Fp8* out = static_cast<Fp8*>(first);
    for (int64_t d = 0; d < value_dim; ++d) out[2 * d] = scaled_fp8(value[d], scale);
    *power = scale.power;
  } else if (type == KvType::kBfloat16) {
    Bf16* out = static_cast<Bf16*>(first);
    for (int64_t d = 0; d < value_dim; ++d) out[2 * d] = float_to_bf16(value[d]);
  } else {
    float* out = static_cast<float*>(first);
    for (int64_t d = 0; d < value_dim; ++d) out[d] = value[d];
  }
}

// The greatest logit, NaN if one is, and where the first block that holds it begins.
struct Top {
  static constexpr int64_t kBlock = 256;
  float logit = -HUGE_VALF;
  int64_t block = 0;
};

inline Top top_of(const float* logits, int64_t vocab) {
  const F16 lowest = F16::broadcast(-HUGE_VALF);
  Top top;
  bool nan = false;
  for (int64_t start = 0; start < vocab; start += Top::kBlock) {
    F16 greatest[4] = {lowest, lowest, lowest, lowest};
    const int64_t end = start + Top::kBlock < vocab ? start + Top::kBlock : vocab;
    int64_t i = start;
    for (; i + 64 <= end; i += 64) {
      unroll<4>([&](auto v) TWINPLANE_INLINE {
        const F16 x = F16::load(logits + i + v.value * 16);
        // Asked for ahead, as the products do; beyond the end is no fault.
        __builtin_prefetch(logits + i + v.value * 16 + 1024);
        nan |= x.has_nan();
        greatest[v.value] = greatest[v.value].max(x);
      });
    }
    for (; i < end; i += 16) {
      const F16 x = load_at(logits, i, vocab).keep(0, vocab - i, lowest);
      nan |= x.has_nan();
      greatest[0] = greatest[0].max(x);
    }
    const float here = greatest[0].max(greatest[1]).max(greatest[2].max(greatest[3])).greatest();
    if (here > top.logit) top = {here, start};
  }
  if (nan) top.logit = NAN;
  return top;
}

float greatest_logit(const float* logits, int64_t vocab) { return top_of(logits, vocab).logit; }

int64_t argmax(const float* logits, int64_t vocab) {
  const Top top = top_of(logits, vocab);
  if (!(top.logit > -HUGE_VALF && top.logit < HUGE_VALF)) return -1;
  int64_t index = top.block;
  while (logits[index] != top.logit) ++index;
  return index;
}

template <bool Ahead>
inline float sum_of(const float* values, int64_t count) {
  F16 total[4] = {F16::zero(), F16::zero(), F16::zero(), F16::zero()};
  for (int64_t i = 0; i < count; i += 64) {
    if constexpr (Ahead)
      unroll<4>([&](auto v) TWINPLANE_INLINE { __builtin_prefetch(values + i + v.value * 16 + 1024); });
    unroll<4>([&](auto v) TWINPLANE_INLINE { total[v.value] = total[v.value] + F16::load(values + i + v.value * 16); });
  }
  return ((total[0] + total[1]) + (total[2] + total[3])).sum();
}

float sum(const float* values, int64_t count) { return sum_of<true>(values, count); }
float sum_plain(const float* values, int64_t count) { return sum_of<false>(values, count); }

int64_t fma_chain(int64_t rounds, float* sink) {
  constexpr int kChains = kRegisters - 2 < 12 ? kRegisters - 2 : 12;
  F16 c[kChains];
  unroll<kChains>([&](auto i) TWINPLANE_INLINE { c[i.value] = F16::broadcast(static_cast<float>(i.value)); });
  const F16 a = F16::broadcast(sink[0]);
  const F16 b = F16::broadcast(sink[1]);
  for (int64_t round = 0; round < rounds; ++round) {
    unroll<kChains>([&](auto i) TWINPLANE_INLINE { c[i.value] = c[i.value].plus_product(a, b); });
  }
  F16 total = F16::zero();
  unroll<kChains>([&](auto i) TWINPLANE_INLINE { total = total + c[i.value]; });
  sink[2] = total.sum();
  return rounds * kChains * 2 * 16;
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
