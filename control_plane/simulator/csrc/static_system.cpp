#include "control_plane/simulator/csrc/static_system.hpp"

#include <algorithm>
#include <stdexcept>

namespace twinplane::simulator {

StaticSystem::StaticSystem(const Trace& trace, const StaticOptions& options, Recorder& recorder)
    : trace_(trace),
      options_(options),
      recorder_(recorder),
      batch_size_(std::min(options.max_batch, options.capacity_tokens / std::max(options.max_model_len, 1u))) {
  trace.require_single_samples();
  if (batch_size_ == 0) throw std::invalid_argument("the KV memory does not hold one sequence of max_model_len");
}

void StaticSystem::submit(size_t i, Nanos) {
  if (uint64_t{trace_[i].prompt_tokens} + trace_[i].output_tokens > options_.max_model_len) return recorder_.refuse(i);
  waiting_.push_back(i);
}

void StaticSystem::form_batch(Nanos now) {
  emitted_ = prompt_ = outputs_ = 0;
  while (!waiting_.empty() && batch_.size() < batch_size_) {
    const size_t i = waiting_.front();
    waiting_.pop_front();
    batch_.push_back(i);
    prompt_ = std::max(prompt_, trace_[i].prompt_tokens);
    outputs_ = std::max(outputs_, trace_[i].output_tokens);
    recorder_.scheduled(i, now);
  }
}

// Sequences that are done, and padding, are computed all the same.
std::optional<Work> StaticSystem::next_step(Nanos now) {
  if (is_busy_) return std::nullopt;
  if (batch_.empty()) form_batch(now);
  if (batch_.empty()) return std::nullopt;
  Work work;
  for (size_t k = 0; k < batch_.size(); ++k) {
    if (emitted_ == 0) {
      work.add(0, prompt_);
    } else {
      work.add(prompt_ + emitted_ - 1, 1);
    }
  }
  is_busy_ = true;
  return work;
}

void StaticSystem::complete(const Ran&, Nanos now) {
  is_busy_ = false;
  ++emitted_;
  for (const size_t i : batch_) {
    if (emitted_ <= trace_[i].output_tokens) recorder_.tokens(i, 1, now);
  }
  if (emitted_ != outputs_) return;
  for (const size_t i : batch_) recorder_.finish(i, now);
  batch_.clear();
}

Memory StaticSystem::memory() const {
  Memory memory;
  memory.capacity = options_.capacity_tokens;
  memory.running = static_cast<uint32_t>(batch_.size());
  memory.waiting = static_cast<uint32_t>(waiting_.size());
  for (const size_t i : batch_) {
    // While the step that computes the last known token runs, as in the other systems.
    const uint32_t needed = trace_[i].prompt_tokens + trace_[i].output_tokens - 1;
    const uint32_t held = std::min(trace_[i].prompt_tokens + emitted_, needed);
    memory.held += held;
    memory.reserved += needed - held;
    memory.overreserved += options_.max_model_len - needed;
    memory.allocated += options_.max_model_len;
  }
  memory.mapped = memory.allocated;
  return memory;
}

}  // namespace twinplane::simulator
