// A paged scheduler of the first generation ("V0"): whole prompts before any decode, in steps of their own;
// recomputation when blocks run out; one step planned at a time. The host time of such a scheduler is the clock's to
// add.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "control_plane/core/config.hpp"
#include "control_plane/simulator/csrc/system.hpp"
#include "control_plane/simulator/csrc/trace.hpp"

namespace twinplane::simulator {

struct PrefillFirstOptions {
  core::Pool pool;
  uint32_t max_model_len;
  uint32_t max_batch;           // sequences
  uint32_t max_prefill_tokens;  // of one step's prompts
};

class PrefillFirstSystem final : public System {
 public:
  PrefillFirstSystem(const Trace& trace, const PrefillFirstOptions& options, Recorder& recorder);

  void submit(size_t request, Nanos now) override;
  std::optional<Work> next_step(Nanos now) override;
  void complete(const Ran& step, Nanos now) override;
  Memory memory() const override;

 private:
  struct Job {
    size_t request;
    uint32_t known = 0;   // prompt and emitted tokens
    uint32_t blocks = 0;  // held
    uint32_t computed = 0;
  };

  uint32_t blocks_of(uint32_t tokens) const;
  Work prefill(Nanos now);
  Work decode();
  void preempt_last();

  const Trace& trace_;
  const PrefillFirstOptions options_;
  Recorder& recorder_;
  const uint32_t watermark_;  // blocks an admission leaves free, so that it is not preempted at once
  std::deque<Job> waiting_;
  std::vector<Job> running_;  // in order of arrival
  size_t first_in_step_ = 0;  // running jobs from here on are in the step in flight
  uint32_t free_;
  bool is_busy_ = false;
};

}  // namespace twinplane::simulator
