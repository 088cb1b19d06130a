// What all panel products share. Included before them.

namespace twinplane::kernels::TWINPLANE_ISA {

inline constexpr int kPanelColumns = kPanelVectors * 16;
static_assert(kPanelColumns <= kMaxPanelColumns && kDepthBlock % kGroup == 0);

// Who has one strip of rows asks for the weights that are needed this much later, at last for the first of the next
// panel; the strips of more rows ask for the whole next panel, a share each. So memory is never idle.
inline constexpr int64_t kPrefetchBytes = 4096;

template <int64_t Bytes>
TWINPLANE_INLINE inline void prefetch(const char* p) {
  unroll<static_cast<int>((Bytes + 63) / 64)>([&](auto i)
                                                  TWINPLANE_INLINE { __builtin_prefetch(p + 64 * i.value, 0, 2); });
}

// What a strip asks for while it works on a panel: `bytes` of it for each k.
struct Ahead {
  const char* from;
  int64_t bytes;
};

// For strip i of some, over `depth`: its share of `bytes` at `next`.
inline Ahead share_of(const void* next, int64_t bytes, int64_t depth, int64_t i, int64_t strips) {
  const int64_t per_k = (bytes + depth * strips - 1) / (depth * strips);
  return {static_cast<const char*>(next) + i * per_k * depth, per_k};
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
