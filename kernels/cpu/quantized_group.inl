// How packed groups of quantized weights (formats.hpp) and of activations are read. Included before quantized.inl.

namespace twinplane::kernels::TWINPLANE_ISA {

template <WeightKind Kind>
struct KindIs {
  static constexpr WeightKind value = Kind;
};

// body(KindIs<kind>{})
template <class Body>
TWINPLANE_INLINE inline void with_quantized(WeightKind kind, const Body& body) {
  switch (kind) {
    case WeightKind::kQ8_0:
      return body(KindIs<WeightKind::kQ8_0>{});
    case WeightKind::kQ4_0:
      return body(KindIs<WeightKind::kQ4_0>{});
    case WeightKind::kQ4_1:
      return body(KindIs<WeightKind::kQ4_1>{});
    case WeightKind::kQ5_0:
      return body(KindIs<WeightKind::kQ5_0>{});
    case WeightKind::kQ5_1:
      return body(KindIs<WeightKind::kQ5_1>{});
    case WeightKind::kQ4_K:
      return body(KindIs<WeightKind::kQ4_K>{});
    case WeightKind::kQ5_K:
      return body(KindIs<WeightKind::kQ5_K>{});
    case WeightKind::kQ6_K:
      return body(KindIs<WeightKind::kQ6_K>{});
    case WeightKind::kFloat32:
    case WeightKind::kBfloat16:
      return;  // not quantized: nobody asks
  }
}

// One group of 32 weights per column: its scales, and its numbers quad by quad.
template <WeightKind Kind>
struct QuantizedGroup {
  static constexpr Format kFormat = format_of(Kind);
  static constexpr bool kMinimum = kFormat.minimum;
  static constexpr int kParts = kFormat.parts;
  static constexpr bool kSigned = kFormat.words == 8;
  static constexpr int kQuadsPerWord = kSigned ? 1 : 2;
  static constexpr int kHighBits = kSigned ? 0 : static_cast<int>(kFormat.words) - 4;
  static constexpr int kGreatest = kSigned ? 128 : (16 << kHighBits) - 1;
  static constexpr int64_t kWordBytes = 4 * kPanelColumns;
  static constexpr int64_t kBytes = kFormat.packed_bytes(kPanelColumns) / kFormat.groups();  // about

  F16 scale[kParts][kPanelVectors];
  F16 minimum[kPanelVectors];  // added to scale * number
  const uint8_t* words;

  // Asks for what lies `ahead` bytes behind it.
  TWINPLANE_INLINE QuantizedGroup(const void* panel, int64_t index, int64_t ahead) : QuantizedGroup(panel, index) {
    prefetch<kBytes>(reinterpret_cast<const char*>(words) - kFormat.scales * kPanelColumns + ahead);
  }
  // Asks for nothing: somebody else does.
  TWINPLANE_INLINE QuantizedGroup(const void* panel, int64_t index) {
    const uint8_t* block =
        static_cast<const uint8_t*>(panel) + index / kFormat.groups() * kFormat.packed_bytes(kPanelColumns);
    const uint8_t* group =
        block + kFormat.head_bytes(kPanelColumns) + index % kFormat.groups() * kFormat.group_bytes(kPanelColumns);
    words = group + kFormat.scales * kPanelColumns;
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

  // body(t, numbers) for each quad t of a part; numbers[v] holds 16 columns times 4 bytes. Apart: beside so many sums
  // that no number may be loaded before its turn.
  template <int Part, bool Apart, class Body>
  TWINPLANE_INLINE void for_quads(const Body& body) const {
    constexpr int kWords = kGroup / 4 / kQuadsPerWord / kParts;
    Words high[kPanelVectors];
    if constexpr (kHighBits > 0) load_words(kWords * kParts + Part, high);
    const auto quads_of = [&](int64_t w) TWINPLANE_INLINE {
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
    };
    if constexpr (kRegisters >= 32) {
      // Not a loop: GCC would copy the sums to other registers and back each time around.
      unroll<kWords>([&](auto w) TWINPLANE_INLINE {
        if constexpr (Apart) asm volatile("" ::: "memory");
        quads_of(Part * kWords + w.value);
      });
    } else {
#pragma GCC unroll 1  // else more values are alive than there are registers
      for (int64_t w = Part * kWords; w < (Part + 1) * kWords; ++w) quads_of(w);
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
      for_quads<part.value, false>([&](int64_t t, const Words(&numbers)[kPanelVectors]) TWINPLANE_INLINE {
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

}  // namespace twinplane::kernels::TWINPLANE_ISA
