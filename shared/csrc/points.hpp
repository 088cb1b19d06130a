// Named places between two steps of the protocol, where a test may kill or stop the process that passes them.
// In service the hook is null and a point costs one load and one predicted branch; so the binary that is
// tested is the one that ships.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <string_view>

namespace twinplane::shm {

// The labels are those of PROTOCOL.md; "before" and "after" refer to the store or load they name.
enum class Point : size_t {
  kBeforeReady,      // header written, `ready` not
  kBeforePublish,    // slot filled, counter not moved
  kAfterPublish,     // counter moved, bell not rung
  kBeforeConsume,    // slot read, counter not moved
  kAfterConsume,     // counter moved, bell not rung
  kBeforeSleeping,   // `rings` read, not announced
  kAfterSleeping,    // announced, news not checked again
  kBeforeFutexWait,  // checked, about to sleep
  kAfterFutexWait,   // woken, still announced
  kAfterRing,        // `rings` moved, sleeper not looked for
  kBeforeFutexWake,  // sleeper seen, not woken
  kBeforeInterrupt,  // the control plane wants its turn, the data plane can not know
  kAfterInterrupt,   // `interrupted` moved
  kCount,
};

inline constexpr std::array<std::string_view, static_cast<size_t>(Point::kCount)> kPointNames = {
    "before-ready-H1",    "before-publish-P1",   "after-publish-P1",   "before-consume-C1", "after-consume-C1",
    "before-sleeping-B1", "after-sleeping-B1",   "before-futex-wait",  "after-futex-wait",  "after-ring-B3",
    "before-futex-wake",  "before-interrupt-I1", "after-interrupt-I1",
};

using PointHook = void (*)(Point);
inline std::atomic<PointHook> point_hook{nullptr};

inline void pass(Point point) {
  if (const PointHook hook = point_hook.load(std::memory_order_relaxed)) [[unlikely]] {
    hook(point);
  }
}

}  // namespace twinplane::shm
