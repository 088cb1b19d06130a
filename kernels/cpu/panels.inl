// What all panel products share. Included before them.

namespace twinplane::kernels::TWINPLANE_ISA {

inline constexpr int kPanelColumns = kPanelVectors * 16;
static_assert(kPanelColumns <= kMaxPanelColumns && kDepthBlock % kGroup == 0);

// Weights come from memory in one long line; ask for what is needed this much later. (Past the end it asks in vain,
// which is harmless.)
inline constexpr int64_t kPrefetchBytes = 4096;

template <int64_t Bytes>
TWINPLANE_INLINE inline void prefetch(const void* p) {
  const char* line = static_cast<const char*>(p) + kPrefetchBytes;
  unroll<static_cast<int>((Bytes + 63) / 64)>([&](auto i)
                                                  TWINPLANE_INLINE { __builtin_prefetch(line + 64 * i.value); });
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
