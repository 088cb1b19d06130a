// What a simulation is for: times of every request, gaps between tokens, memory over time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "control_plane/simulator/csrc/trace.hpp"

namespace twinplane::simulator {

inline constexpr Nanos kNever{std::numeric_limits<uint64_t>::max()};

// KV memory at one moment, in tokens, and who is where. What several sequences share counts once, but in `mapped`. A
// contiguous manager's `allocated` is held + reserved + overreserved; the rest of `capacity` is free, or fragmented.
struct Memory {
  uint64_t held = 0;          // KV entries that are computed (or being computed by a step in flight)
  uint64_t reserved = 0;      // not computed yet, but will be
  uint64_t overreserved = 0;  // allocated and never to be used: internal fragmentation
  uint64_t allocated = 0;
  uint64_t mapped = 0;  // what would be allocated if sequences shared no block
  uint64_t capacity = 0;
  uint32_t running = 0;
  uint32_t waiting = 0;
};

enum class Outcome : uint8_t { kUnfinished = 0, kFinished = 1, kRefused = 2, kGivenUp = 3 };

struct RequestRecord {
  Nanos first_scheduled = kNever;
  Nanos first_token = kNever;
  Nanos finish = kNever;
  uint32_t tokens = 0;  // emitted, by all samples
  uint32_t preemptions = 0;
  uint32_t cached_tokens = 0;
  Outcome outcome = Outcome::kUnfinished;
};

struct MemorySample {
  Nanos at;
  Memory memory;
};

// Sums over virtual time, in tokens (or requests) times seconds.
struct MemorySums {
  double held = 0, reserved = 0, overreserved = 0, allocated = 0, mapped = 0, capacity = 0;
  double running = 0, waiting = 0, seconds = 0;

  void add(const Memory& memory, double dt) {
    held += dt * static_cast<double>(memory.held);
    reserved += dt * static_cast<double>(memory.reserved);
    overreserved += dt * static_cast<double>(memory.overreserved);
    allocated += dt * static_cast<double>(memory.allocated);
    mapped += dt * static_cast<double>(memory.mapped);
    capacity += dt * static_cast<double>(memory.capacity);
    running += dt * memory.running;
    waiting += dt * memory.waiting;
    seconds += dt;
  }
};

class Recorder {
 public:
  // A memory sample is kept at most every `sample_interval`; sums see every step, from `measure_from` on.
  Recorder(const Trace& trace, Nanos sample_interval, Nanos measure_from)
      : trace_(trace),
        requests_(trace.size()),
        last_token_(trace.num_sequences(), kNever),
        sample_interval_(sample_interval),
        measure_from_(measure_from) {}

  void refuse(size_t i) { close(requests_[i], Outcome::kRefused); }

  // Only the first call for a request counts.
  void scheduled(size_t i, Nanos now) {
    if (requests_[i].first_scheduled == kNever) requests_[i].first_scheduled = now;
  }

  // `count` tokens of a sequence came out of a step at once. Gaps are between two tokens of the same sequence.
  void tokens(uint64_t sequence, uint32_t count, Nanos now) {
    RequestRecord& request = requests_[trace_.request_of(sequence)];
    Nanos& last = last_token_[sequence];
    for (uint32_t k = 0; k < count; ++k) {
      if (request.tokens++ == 0) request.first_token = now;
      if (last != kNever) gaps_s_.push_back(static_cast<float>(static_cast<double>((now - last).value) * 1e-9));
      last = now;
    }
  }

  void finish(size_t i, Nanos now) {
    requests_[i].finish = now;
    close(requests_[i], Outcome::kFinished);
  }

  // It ended before its answer was complete.
  void give_up(size_t i) { close(requests_[i], Outcome::kGivenUp); }

  RequestRecord& request(size_t i) { return requests_[i]; }
  const std::vector<RequestRecord>& requests() const { return requests_; }
  const std::vector<float>& gaps_s() const { return gaps_s_; }
  size_t num_closed() const { return num_closed_; }

  // Memory is so from now on.
  void memory(const Memory& memory, Nanos now) {
    settle(now);
    memory_ = memory;
    if (samples_.empty() || now - samples_.back().at >= sample_interval_) samples_.push_back({now, memory});
  }

  // Brings the sums up to `now`.
  void settle(Nanos now) {
    const Nanos from = std::max(since_, measure_from_);
    if (now > from) sums_.add(memory_, static_cast<double>((now - from).value) * 1e-9);
    since_ = now;
  }

  const std::vector<MemorySample>& samples() const { return samples_; }
  const MemorySums& sums() const { return sums_; }

 private:
  void close(RequestRecord& request, Outcome outcome) {
    request.outcome = outcome;
    ++num_closed_;
  }

  const Trace& trace_;
  std::vector<RequestRecord> requests_;
  std::vector<Nanos> last_token_;  // by sequence
  std::vector<float> gaps_s_;
  std::vector<MemorySample> samples_;
  MemorySums sums_;
  Memory memory_;
  Nanos since_;
  Nanos sample_interval_;
  Nanos measure_from_;
  size_t num_closed_ = 0;
};

}  // namespace twinplane::simulator
