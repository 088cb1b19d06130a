// Orca (Yu et al., OSDI 2022) as arXiv 2309.06180, section 6.1 models it: iteration-level scheduling, first come first
// served, and one contiguous reservation per request.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "control_plane/simulator/csrc/buddy_allocator.hpp"
#include "control_plane/simulator/csrc/system.hpp"
#include "control_plane/simulator/csrc/trace.hpp"

namespace twinplane::simulator {

// What a request reserves: the longest sequence there can be; its prompt and the next power of two of its output; or
// exactly what it will need, which no real system can know.
enum class Reservation { kMax, kPow2, kOracle };

struct ContiguousOptions {
  Reservation reservation;
  uint32_t capacity_tokens;
  uint32_t max_model_len;
  uint32_t max_batch;
};

class ContiguousSystem final : public System {
 public:
  ContiguousSystem(const Trace& trace, const ContiguousOptions& options, Recorder& recorder);

  void submit(size_t request, Nanos now) override;
  std::optional<Work> next_step(Nanos now) override;
  void complete(const Ran& step, Nanos now) override;
  Memory memory() const override;

 private:
  struct Resident {
    size_t request;
    uint32_t address;
    uint32_t computed = 0;  // tokens in the KV cache
    uint32_t emitted = 0;
  };

  uint32_t reserved_by(size_t request) const;
  uint32_t needed_by(size_t request) const;
  void admit(Nanos now);

  const Trace& trace_;
  const ContiguousOptions options_;
  Recorder& recorder_;
  BuddyAllocator arena_;
  std::deque<size_t> waiting_;
  std::vector<Resident> running_;
  bool is_busy_ = false;
};

}  // namespace twinplane::simulator
