// What all panel products share. Included before them.

namespace twinplane::kernels::TWINPLANE_ISA {

inline constexpr int kPanelColumns = kPanelVectors * 16;
static_assert(kPanelColumns <= kMaxPanelColumns && kDepthBlock % kGroup == 0);

// Weights come from memory in one long line. Who has one strip of rows asks for what is needed this much later; the
// strips of more rows ask for what comes after the panel, a share each. So memory is never idle. (Past the end they ask
// in vain, which is harmless.)
inline constexpr int64_t kPrefetchBytes = 4096;

template <int64_t Bytes>
TWINPLANE_INLINE inline void prefetch(const char* p) {
  unroll<static_cast<int>((Bytes + 63) / 64)>([&](auto i) TWINPLANE_INLINE { __builtin_prefetch(p + 64 * i.value); });
}

// What a strip asks for while it works on a panel: `bytes` of it for each k.
struct Ahead {
  const char* from;
  int64_t bytes;
};

// For one strip, of weights of so many bytes per k.
inline Ahead ahead_of(const void* weights, int64_t bytes) {
  return {static_cast<const char*>(weights) + kPrefetchBytes, bytes};
}

// For strip i of several, over `depth`: its share of `bytes` at `next`.
inline Ahead share_of(const void* next, int64_t bytes, int64_t depth, int64_t i, int64_t strips) {
  const int64_t per_k = (bytes + depth * strips - 1) / (depth * strips);
  return {static_cast<const char*>(next) + i * per_k * depth, per_k};
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
