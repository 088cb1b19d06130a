// Request-level batching, as FasterTransformer behind a dynamic batcher (arXiv 2309.06180, section 6.1): the earliest
// arrivals form a batch, padded to its longest prompt; it runs until its longest output is done, and answers together.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "control_plane/simulator/csrc/system.hpp"
#include "control_plane/simulator/csrc/trace.hpp"

namespace twinplane::simulator {

struct StaticOptions {
  uint32_t capacity_tokens;
  uint32_t max_model_len;
  uint32_t max_batch;  // at most so many; and so many that each can become max_model_len long
};

class StaticSystem final : public System {
 public:
  StaticSystem(const Trace& trace, const StaticOptions& options, Recorder& recorder);

  void submit(size_t request, Nanos now) override;
  std::optional<Work> next_step(Nanos now) override;
  void complete(const Ran& step, Nanos now) override;
  Memory memory() const override;

 private:
  void form_batch(Nanos now);

  const Trace& trace_;
  const StaticOptions options_;
  Recorder& recorder_;
  const uint32_t batch_size_;
  std::deque<size_t> waiting_;
  std::vector<size_t> batch_;
  uint32_t prompt_ = 0;   // of the batch: its longest
  uint32_t outputs_ = 0;  // of the batch: its longest
  uint32_t emitted_ = 0;
  bool is_busy_ = false;
};

}  // namespace twinplane::simulator
