#include "control_plane/simulator/csrc/contiguous_system.hpp"

#include <algorithm>
#include <bit>

namespace twinplane::simulator {

ContiguousSystem::ContiguousSystem(const Trace& trace, const ContiguousOptions& options, Recorder& recorder)
    : trace_(trace), options_(options), recorder_(recorder), arena_(options.capacity_tokens) {
  trace.require_single_samples();
}

uint32_t ContiguousSystem::reserved_by(size_t i) const {
  const Request& request = trace_[i];
  switch (options_.reservation) {
    case Reservation::kMax:
      return options_.max_model_len;
    case Reservation::kPow2:
      return std::min(request.prompt_tokens + std::bit_ceil(request.output_tokens), options_.max_model_len);
    case Reservation::kOracle:
      break;
  }
  return request.prompt_tokens + request.output_tokens;
}

// The last token is never stored.
uint32_t ContiguousSystem::needed_by(size_t i) const { return trace_[i].prompt_tokens + trace_[i].output_tokens - 1; }

void ContiguousSystem::submit(size_t i, Nanos) {
  const uint64_t length = uint64_t{trace_[i].prompt_tokens} + trace_[i].output_tokens;
  if (length > options_.max_model_len || reserved_by(i) > arena_.largest()) return recorder_.refuse(i);
  waiting_.push_back(i);
}

void ContiguousSystem::admit(Nanos now) {
  while (!waiting_.empty() && running_.size() < options_.max_batch) {
    const size_t i = waiting_.front();
    const std::optional<uint32_t> address = arena_.allocate(reserved_by(i));
    if (!address) return;  // nobody overtakes
    recorder_.scheduled(i, now);
    running_.push_back({.request = i, .address = *address});
    waiting_.pop_front();
  }
}

// Prompts go whole into the iteration that admits them, beside the decodes of the others.
std::optional<Work> ContiguousSystem::next_step(Nanos now) {
  if (is_busy_) return std::nullopt;
  admit(now);
  if (running_.empty()) return std::nullopt;
  Work work;
  for (Resident& resident : running_) {
    const uint32_t known = trace_[resident.request].prompt_tokens + resident.emitted;
    work.add(resident.computed, known - resident.computed);
    resident.computed = known;
  }
  is_busy_ = true;
  return work;
}

void ContiguousSystem::complete(const Ran&, Nanos now) {
  is_busy_ = false;
  for (Resident& resident : running_) {
    ++resident.emitted;
    recorder_.tokens(resident.request, 1, now);
  }
  std::erase_if(running_, [&](const Resident& resident) {
    if (resident.emitted < trace_[resident.request].output_tokens) return false;
    arena_.release(resident.address);
    recorder_.finish(resident.request, now);
    return true;
  });
}

Memory ContiguousSystem::memory() const {
  Memory memory;
  memory.capacity = options_.capacity_tokens;
  memory.running = static_cast<uint32_t>(running_.size());
  memory.waiting = static_cast<uint32_t>(waiting_.size());
  for (const Resident& resident : running_) {
    const uint32_t needed = needed_by(resident.request);
    memory.held += resident.computed;
    memory.reserved += needed - resident.computed;
    memory.overreserved += reserved_by(resident.request) - needed;
    memory.allocated += reserved_by(resident.request);
  }
  memory.mapped = memory.allocated;
  return memory;
}

}  // namespace twinplane::simulator
