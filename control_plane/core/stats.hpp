// Numbers about the core, and a board on which its thread shows them to the others.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "control_plane/core/scheduler.hpp"

namespace twinplane::core {

// Plain words, so that the board can copy it as such.
struct Stats {
  uint64_t running = 0;
  uint64_t waiting = 0;
  uint64_t waiting_tokens = 0;
  uint64_t dequeued = 0;
  uint64_t dequeued_tokens = 0;
  uint64_t blocks_total = 0;
  uint64_t blocks_free = 0;    // with nothing in them
  uint64_t blocks_cached = 0;  // free, but in the prefix cache
  uint64_t blocks_referenced = 0;
  uint64_t blocks_fenced = 0;
  Counters counters;
  uint64_t tick_ns_total = 0;
  uint64_t tick_ns_max = 0;
  uint64_t missed_wakes = 0;
};

// The gate's share: the queue.
inline void add_queue(Stats& stats, const Gate& gate) {
  stats.waiting = gate.waiting_requests();
  stats.waiting_tokens = gate.waiting_tokens();
  stats.dequeued = gate.dequeued_requests();
  stats.dequeued_tokens = gate.dequeued_tokens();
}

// What the scheduler knows of it; the queue is the gate's to tell, the times are the engine's.
inline Stats stats_of(const Scheduler& scheduler) {
  Stats stats;
  stats.running = scheduler.population().running.size();
  if (const auto& session = scheduler.session()) {
    stats.blocks_total = session->blocks.total().value;
    stats.blocks_cached = session->blocks.cached().value;
    stats.blocks_free = session->blocks.free().value - stats.blocks_cached;
    stats.blocks_referenced = session->blocks.referenced().value;
    stats.blocks_fenced = session->blocks.soon_free().value;
  }
  stats.counters = scheduler.counters();
  return stats;
}

// A sequence lock: the writer never waits, a reader tries again if it was overtaken. All words are atomics, so even a
// copy that is thrown away is no data race (Boehm, MSPC'12).
class StatsBoard {
 public:
  void publish(const Stats& stats) {
    const Words words = std::bit_cast<Words>(stats);
    const uint64_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);  // odd: being written
    std::atomic_thread_fence(std::memory_order_release);
    for (size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_relaxed);
    version_.store(version + 2, std::memory_order_release);
  }

  Stats read() const {
    for (;;) {
      const uint64_t before = version_.load(std::memory_order_acquire);
      Words words;
      // Acquire on each word instead of a fence behind them: the second look at the version stays behind.
      for (size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
      if (before % 2 == 0 && version_.load(std::memory_order_relaxed) == before) return std::bit_cast<Stats>(words);
    }
  }

 private:
  static constexpr size_t kWords = sizeof(Stats) / sizeof(uint64_t);
  using Words = std::array<uint64_t, kWords>;

  std::atomic<uint64_t> version_{0};
  std::array<std::atomic<uint64_t>, kWords> words_{};
};

}  // namespace twinplane::core
