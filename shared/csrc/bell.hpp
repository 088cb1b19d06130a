// Doorbells: how one plane tells the other to look again. A bell carries no truth (INV-1); it only ends a sleep.
//
//   waiter (owner of the bell)                   ringer (after making its news visible)
//     seen = load rings                            fetch_add rings, 1              [B3]
//     store sleeping = 1               [B1]        if load sleeping == 1           [B4]
//     news? -> sleeping = 0, return    [B2]          futex_wake(rings)
//     futex_wait(rings, seen, bounded)
//     store sleeping = 0
//
// Why no wake-up is lost. The load of `seen`, [B1], [B3] and [B4] are sequentially consistent, so they have one order:
//   - [B3] before the load of `seen`: the load reads from it, so the news, written before [B3], is visible at [B2].
//   - [B3] after the load, and [B4] reads 1: the ringer wakes. If the waiter is not asleep yet, the kernel
//     finds rings != seen and does not let it sleep.
//   - [B3] after the load, and [B4] reads 0: then [B4], and [B3] before it, came before [B1]. The kernel's
//     comparison comes after [B1] (the system call is a full barrier), finds rings != seen, and returns at once.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdint>

#include "shared/csrc/futex.hpp"
#include "shared/csrc/points.hpp"
#include "shared/csrc/wire.hpp"
#include "shared/csrc/word.hpp"

namespace twinplane::shm {

inline constexpr uint64_t kWaitBoundNs = 20'000'000;  // no sleep is longer (INV-4)
inline constexpr uint64_t kRingGraceNs = 1'000'000;   // how long a ringer may be between its news and its ring

// Any thread of any process; call it after the news is visible. No system call unless the owner sleeps.
inline void ring(wire::Bell& bell) {
  std::atomic_ref<uint32_t>(bell.rings).fetch_add(1, std::memory_order_seq_cst);  // [B3]
  pass(Point::kAfterRing);
  if (load(bell.sleeping, std::memory_order_seq_cst) == 1) {  // [B4]
    pass(Point::kBeforeFutexWake);
    futex_wake(bell.rings);
  }
}

// A short, adaptive look around before going to sleep. Only where there are more cores than planes: on two cores a
// spinning waiter takes the core from somebody who computes.
class Spinner {
 public:
  template <typename News>
  bool found(News& news) {
    for (uint32_t i = 0; i < limit_; ++i) {
      if (news()) {
        limit_ = std::min(limit_ * 2, kMax);
        return true;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    if (limit_ != 0) limit_ = std::max(limit_ / 2, kMin);
    return false;
  }

 private:
  static constexpr int kPlanes = 2;
  static constexpr uint32_t kMin = 8, kMax = 256;  // pauses; 256 take some 10 us

  static bool spare_cores() {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof(allowed), &allowed) == 0 && CPU_COUNT(&allowed) > kPlanes;
  }

  uint32_t limit_ = spare_cores() ? kMin : 0;
};

enum class Wake {
  kNews,      // `news()` was true
  kRung,      // rung, interrupted or woken for nothing: look around and come back
  kTimedOut,  // nothing for the whole time: check that the peer lives (INV-4)
};

// The owner's side of a bell. One thread at a time: `sleeping` has one writer.
class BellWaiter {
 public:
  // `bound_ns` is kWaitBoundNs in service. Stress tests make it long: a lost wake-up is then a stall nobody
  // can miss, instead of a hiccup that the bound repairs.
  explicit BellWaiter(wire::Bell& bell, uint64_t bound_ns = kWaitBoundNs) : bell_(&bell), bound_ns_(bound_ns) {}

  // Sleeps once, until rung, at most min(timeout_ns, bound). `news` must read, with acquire, whatever the ringers
  // publish before they ring. The caller loops.
  template <typename News>
  Wake wait(News&& news, uint64_t timeout_ns) {
    if (news()) return Wake::kNews;
    if (timeout_ns == 0) return Wake::kTimedOut;
    if (spinner_.found(news)) return Wake::kNews;

    const uint32_t seen = load(bell_->rings, std::memory_order_seq_cst);
    pass(Point::kBeforeSleeping);
    store(bell_->sleeping, 1u, std::memory_order_seq_cst);  // [B1]
    pass(Point::kAfterSleeping);
    FutexWait end = FutexWait::kChanged;
    if (!news()) {  // [B2]
      pass(Point::kBeforeFutexWait);
      const uint64_t sleep_ns = std::min(timeout_ns, bound_ns_);
      end = futex_wait(bell_->rings, seen, sleep_ns);
      pass(Point::kAfterFutexWait);
      if (end == FutexWait::kTimedOut && sleep_ns == bound_ns_ && news()) note_late_news(seen);
    }
    // Relaxed: a ringer that still reads 1 makes a system call for nothing, no more.
    store(bell_->sleeping, 0u, std::memory_order_relaxed);
    if (news()) return Wake::kNews;
    return end == FutexWait::kTimedOut ? Wake::kTimedOut : Wake::kRung;
  }

  // Times that news lay there although nobody had rung when a full bound was over. Expected 0. Any thread may read it.
  uint64_t missed_wakes() const { return load(missed_wakes_, std::memory_order_relaxed); }

 private:
  // News after a full bound is no fault if its ring raced with the time-out, or if its ringer is right between
  // publishing and ringing. So give the ring a moment: if the word has moved, or moves, the bell worked.
  void note_late_news(uint32_t seen) {
    if (futex_wait(bell_->rings, seen, kRingGraceNs) == FutexWait::kTimedOut) {
      store(missed_wakes_, missed_wakes_ + 1, std::memory_order_relaxed);
    }
  }

  wire::Bell* bell_;
  uint64_t bound_ns_;
  uint64_t missed_wakes_ = 0;
  Spinner spinner_;
};

}  // namespace twinplane::shm
