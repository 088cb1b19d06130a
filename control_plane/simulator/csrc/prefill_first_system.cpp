#include "control_plane/simulator/csrc/prefill_first_system.hpp"

#include <algorithm>

namespace twinplane::simulator {
namespace {

constexpr uint32_t kWatermarkDivisor = 100;  // one block in a hundred

}  // namespace

PrefillFirstSystem::PrefillFirstSystem(const Trace& trace, const PrefillFirstOptions& options, Recorder& recorder)
    : trace_(trace),
      options_(options),
      recorder_(recorder),
      watermark_(options.pool.num_blocks.value / kWatermarkDivisor),
      free_(options.pool.num_blocks.value) {
  trace.require_single_samples();
}

uint32_t PrefillFirstSystem::blocks_of(uint32_t tokens) const {
  return core::blocks_for({tokens}, options_.pool.block_size).value;
}

void PrefillFirstSystem::submit(size_t i, Nanos) {
  const Request& request = trace_[i];
  const uint32_t length = request.prompt_tokens + request.output_tokens;
  // A preempted sequence comes back as a prompt, so all of it must pass through one step.
  const bool fits = length <= options_.max_model_len && length <= options_.max_prefill_tokens &&
                    blocks_of(length) + watermark_ <= options_.pool.num_blocks.value;
  if (!fits) return recorder_.refuse(i);
  waiting_.push_back({.request = i, .known = request.prompt_tokens});
}

std::optional<Work> PrefillFirstSystem::next_step(Nanos now) {
  if (is_busy_) return std::nullopt;
  Work work = prefill(now);
  if (work.tokens == 0) work = decode();
  if (work.tokens == 0) return std::nullopt;
  is_busy_ = true;
  return work;
}

Work PrefillFirstSystem::prefill(Nanos now) {
  Work work;
  first_in_step_ = running_.size();
  while (!waiting_.empty() && running_.size() < options_.max_batch) {
    Job job = waiting_.front();
    const uint32_t blocks = blocks_of(job.known);
    if (blocks + watermark_ > free_ || work.tokens + job.known > options_.max_prefill_tokens) break;
    waiting_.pop_front();
    free_ -= blocks;
    job.blocks = blocks;
    job.computed = job.known;
    work.add(0, job.known);
    recorder_.scheduled(job.request, now);
    running_.push_back(job);
  }
  return work;
}

Work PrefillFirstSystem::decode() {
  first_in_step_ = 0;
  Work work;
  for (size_t k = 0; k < running_.size(); ++k) {
    while (k < running_.size() && blocks_of(running_[k].known) > running_[k].blocks) {
      if (free_ == 0) {
        preempt_last();  // possibly this one
        continue;
      }
      --free_;
      ++running_[k].blocks;
    }
    if (k == running_.size()) break;
    work.add(running_[k].computed, 1);
    running_[k].computed = running_[k].known;
  }
  return work;
}

void PrefillFirstSystem::preempt_last() {
  Job job = running_.back();
  running_.pop_back();
  free_ += job.blocks;
  job.blocks = job.computed = 0;
  ++recorder_.request(job.request).preemptions;
  waiting_.push_front(job);
}

void PrefillFirstSystem::complete(const Ran&, Nanos now) {
  is_busy_ = false;
  for (size_t k = first_in_step_; k < running_.size(); ++k) {
    ++running_[k].known;
    recorder_.tokens(running_[k].request, 1, now);
  }
  std::erase_if(running_, [&](const Job& job) {
    const Request& request = trace_[job.request];
    if (job.known < request.prompt_tokens + request.output_tokens) return false;
    free_ += job.blocks;
    recorder_.finish(job.request, now);
    return true;
  });
}

Memory PrefillFirstSystem::memory() const {
  Memory memory;
  const uint64_t block_size = options_.pool.block_size.value;
  memory.capacity = options_.pool.num_blocks.value * block_size;
  memory.allocated = (options_.pool.num_blocks.value - free_) * block_size;
  memory.running = static_cast<uint32_t>(running_.size());
  memory.waiting = static_cast<uint32_t>(waiting_.size());
  for (const Job& job : running_) memory.held += job.computed;
  memory.mapped = memory.allocated;
  return memory;
}

}  // namespace twinplane::simulator
