// Panel products of quantized weights (formats.hpp). Included by each isa_*.cpp after dense.inl.
//
// Two ways. panel_product computes in floats with exactly the weights that gguf.dequantize gives, in the same chain of
// multiply-adds over K as dense.inl. integer_product takes x in groups of int8 and multiplies numbers by numbers; only
// the sums are scaled.

namespace twinplane::kernels::TWINPLANE_ISA {

// One group of 32 weights per column: its scales, and its numbers quad by quad.
template <WeightKind Kind>
struct QuantizedGroup {
  static constexpr Format kFormat = format_of(Kind);
  static constexpr bool kMinimum = kFormat.minimum;
  static constexpr int kParts = kFormat.parts;
  static constexpr bool kSigned = Kind == WeightKind::kQ8_0;
  static constexpr int kQuadsPerWord = kSigned ? 1 : 2;
  static constexpr int kHighBits = Kind == WeightKind::kQ5_K ? 1 : Kind == WeightKind::kQ6_K ? 2 : 0;
  static constexpr int kGreatest = kSigned ? 128 : (16 << kHighBits) - 1;
  static constexpr int64_t kWordBytes = 4 * kPanelColumns;

  F16 scale[kParts][kPanelVectors];
  F16 minimum[kPanelVectors];  // added to scale * number
  const uint8_t* words;

  TWINPLANE_INLINE QuantizedGroup(const uint8_t* panel, int64_t index) {
    const uint8_t* block = panel + index / kFormat.groups() * kFormat.packed_bytes(kPanelColumns);
    const uint8_t* group =
        block + kFormat.head_bytes(kPanelColumns) + index % kFormat.groups() * kFormat.group_bytes(kPanelColumns);
    words = group + kFormat.scales * kPanelColumns;
    prefetch<kFormat.packed_bytes(kPanelColumns) / kFormat.groups()>(group);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(block);
    const int8_t* small = reinterpret_cast<const int8_t*>(group);
    unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE {
      constexpr int64_t kColumn = v.value * 16;
      const F16 d = F16::load_half(halves + kColumn);
      // Products of two scales are exact: 11 bits times at most 8.
      unroll<kParts>([&](auto part) TWINPLANE_INLINE {
        scale[part.value][v.value] =
            kFormat.scales == 0 ? d : d * F16::load_int8(small + part.value * kPanelColumns + kColumn);
      });
      if constexpr (kMinimum) {
        const F16 m = F16::load_half(halves + kPanelColumns + kColumn);
        minimum[v.value] = kFormat.scales == 0 ? m : F16::zero() - m * F16::load_int8(small + kPanelColumns + kColumn);
      }
    });
  }

  // body(t, numbers) for each quad t of a part; numbers[v] holds 16 columns times 4 bytes.
  template <int Part, class Body>
  TWINPLANE_INLINE void for_quads(const Body& body) const {
    constexpr int64_t kWords = kGroup / 4 / kQuadsPerWord;
    Words high[kPanelVectors];
    if constexpr (kHighBits > 0) load_words(kWords + Part, high);
#pragma GCC unroll 1  // else the whole group is one stretch of code with more values alive than there are registers
    for (int64_t w = Part * kWords / kParts; w < (Part + 1) * kWords / kParts; ++w) {
      Words word[kPanelVectors];
      load_words(w, word);
      unroll<kQuadsPerWord>([&](auto q) TWINPLANE_INLINE {
        Words numbers[kPanelVectors];
        unroll<kPanelVectors>([&](auto v) TWINPLANE_INLINE {
          if constexpr (kSigned) {
            numbers[v.value] = word[v.value];
          } else {
            numbers[v.value] = word[v.value].template nibbles<q.value>();
          }
          if constexpr (kHighBits > 0) {
            numbers[v.value] = numbers[v.value].template with_high<kHighBits>(high[v.value]);
            high[v.value] = high[v.value].template shifted<kHighBits>();
          }
        });
        body(w * kQuadsPerWord + q.value, numbers);
      });
    }
  }

  // The 16 weights of byte J of a quad.
  template <int Part, int J>
  TWINPLANE_INLINE F16 weights(const Words (&numbers)[kPanelVectors], int v) const {
    F16 q;
    if constexpr (kSigned) {
      q = numbers[v].template signed_byte<J>();
    } else if constexpr (kHighBits == 0) {
      q = numbers[v].template nibble<J, kFormat.offset>();
    } else {
      q = numbers[v].template byte<J>();
      if constexpr (kFormat.offset != 0) q = q - F16::broadcast(static_cast<float>(kFormat.offset));
    }
    // q * scale is exact (at most 24 significant bits), so q * scale + m rounds once, with or without fused arithmetic.
    if constexpr (kMinimum) {
      return minimum[v].plus_product(q, scale[Part][v]);
    } else {
      return q * scale[Part][v];
    }
  }

  // body(k, line) for k = 0 .. 31: the weights of all columns.
  template <class Body>
  TWINPLANE_INLINE void for_lines(const Body& body) const {
    unroll<kParts>([&](auto part) TWINPLANE_INLINE {
      for_quads<part.value>([&](int64_t t, const Words(&numbers)[kPanelVectors]) TWINPLANE_INLINE {
        unroll<4>([&](auto j) TWINPLANE_INLINE {
          F16 line[kPanelVectors];
          unroll<kPanelVectors>(
              [&](auto v) TWINPLANE_INLINE { line[v.value] = weights<part.value, j.value>(numbers, v.value); });
          body(4 * t + j.value, line);
        });
      });
    });
  }

 private:
  TWINPLANE_INLINE void load_words(int64_t w, Words (&out)[kPanelVectors]) const {
    unroll<kPanelVectors>([&](auto v)
                              TWINPLANE_INLINE { out[v.value] = Words::load(words + w * kWordBytes + v.value * 64); });
  }
};

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

// The rows of a strip at one group, three rows to a pointer as StripRows.
template <int Rows>
struct ActivationRows {
  const uint8_t* base[(Rows + 2) / 3];
  int64_t stride;  // bytes

  TWINPLANE_INLINE ActivationRows(const ActivationGroup* x, int64_t groups_between_rows)
      : stride(groups_between_rows * static_cast<int64_t>(sizeof(ActivationGroup))) {
    unroll<(Rows + 2) / 3>(
        [&](auto i) TWINPLANE_INLINE { base[i.value] = reinterpret_cast<const uint8_t*>(x) + 3 * i.value * stride; });
  }
  template <int R>
  TWINPLANE_INLINE const ActivationGroup& group(Index<R>) const {
    return *reinterpret_cast<const ActivationGroup*>(base[R / 3] + (R % 3) * stride);
  }
};

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
      float rounded[16];
      (a[part] * factor).round().store(rounded);
      int32_t sum = 0;
      for (int i = 0; i < 16; ++i) {
        const int32_t number = finite ? static_cast<int32_t>(rounded[i]) : 0;
        out->numbers[16 * part + i] = static_cast<int8_t>(number);
        sum += number;
      }
      out->sums[part] = sum;
    }
    out->weighted_sum = out->scale * static_cast<float>(out->sums[0] + out->sums[1]);
  }
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
