// What a plane says of itself outside the rings: that it lives, and what it is doing. For diagnosis only;
// nothing is decided by the phase.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cstdint>
#include <thread>

#include "shared/csrc/clock.hpp"
#include "shared/csrc/futex.hpp"
#include "shared/csrc/points.hpp"
#include "shared/csrc/wire.hpp"
#include "shared/csrc/word.hpp"

namespace twinplane::shm {

inline constexpr uint64_t kHeartbeatNs = 20'000'000;

inline void beat(wire::PlaneState& own) { store(own.heartbeat_ns, now_ns(), std::memory_order_release); }

// Says what the plane's loop does from now on, and in which step.
inline void set_phase(wire::PlaneState& own, wire::Phase phase, uint64_t step) {
  store(own.phase_step, step, std::memory_order_relaxed);
  store(own.phase_since_ns, now_ns(), std::memory_order_relaxed);
  store(own.phase, static_cast<uint32_t>(phase), std::memory_order_release);
}

// The control plane wants its turn: steps below number `below` end after the substep under way. It only grows, so there
// is nothing to take back, and an interrupt of a step that has ended meanwhile means nothing to the next one.
inline void interrupt(wire::PlaneState& own, uint64_t below) {
  pass(Point::kBeforeInterrupt);
  store(own.interrupted, below, std::memory_order_release);  // [I1]
  pass(Point::kAfterInterrupt);
}

// Read by the data plane after each substep. It sees [I1] as late as the store buffer lets it, that is, within the next
// substep at the latest; nothing else is read on its word.
inline uint64_t interrupted(const wire::PlaneState& peer) {
  return load(peer.interrupted, std::memory_order_acquire);  // [I2] pairs with [I1]
}

// A copy for people. Its fields are read one by one: in the middle of a change they may belong to two phases.
struct PlaneSnapshot {
  uint64_t published, consumed, heartbeat_ns, phase_since_ns, phase_step;
  uint32_t phase;
};

inline PlaneSnapshot snapshot(const wire::PlaneState& plane) {
  constexpr auto kOrder = std::memory_order_acquire;
  const uint32_t phase = load(plane.phase, kOrder);
  return {load(plane.published, kOrder),      load(plane.consumed, kOrder),   load(plane.heartbeat_ns, kOrder),
          load(plane.phase_since_ns, kOrder), load(plane.phase_step, kOrder), phase};
}

// A thread that beats every kHeartbeatNs, so that a long forward pass, or a long hold of the GIL, is not taken for
// death. The page must outlive it.
class Heartbeat {
 public:
  explicit Heartbeat(wire::PlaneState& own) {
    beat(own);
    // The thread inherits a full signal mask: handlers belong to the main thread, and a signal that landed here would
    // not end its waits.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this, &own] { run(own); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~Heartbeat() {
    store(stop_, 1u, std::memory_order_release);
    futex_wake(stop_);
    thread_.join();
  }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

 private:
  void run(wire::PlaneState& own) {
    // Sleeping on the stop word itself: the kernel does not let it sleep once the word is 1.
    while (load(stop_, std::memory_order_acquire) == 0) {
      beat(own);
      futex_wait(stop_, 0, kHeartbeatNs);
    }
  }

  uint32_t stop_ = 0;
  std::thread thread_;
};

}  // namespace twinplane::shm
