#include "control_plane/simulator/csrc/twinplane_system.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

namespace twinplane::simulator {
namespace {

// Ends a sequence. token_at() gives no such token.
constexpr int32_t kEos = 0x7fffffff;

template <typename T>
const T* region(const std::vector<std::byte>& slot, uint64_t offset) {
  return reinterpret_cast<const T*>(slot.data() + offset);
}

// Outputs have streams of their own, those of first samples by the number that a trace may name.
uint64_t output_stream(uint64_t request, uint64_t sample) { return ~request ^ (sample << 40); }

}  // namespace

TwinplaneSystem::TwinplaneSystem(const Trace& trace, const core::Config& config, const core::Pool& pool,
                                 uint32_t check_interval, Recorder& recorder)
    : trace_(trace),
      recorder_(recorder),
      config_(config),
      pool_(pool),
      check_interval_(check_interval),
      capacities_(core::capacities_for(config, pool)),
      step_layout_(capacities_),
      result_layout_(capacities_),
      gate_(config),
      scheduler_(config, gate_, events_),
      step_(step_layout_.bytes),
      result_(result_layout_.bytes),
      sequences_(config.max_rows),
      limits_(config.max_rows),
      unfinished_(trace.size()) {
  for (size_t i = 0; i < trace.size(); ++i) unfinished_[i] = trace[i].samples;
  scheduler_.attach(pool, capacities_);
}

// A client does not know how long its answer will be: max_tokens is above it where the context allows, and the answer
// ends with an end-of-sequence token, unforeseen by the scheduler.
void TwinplaneSystem::submit(size_t i, Nanos now) {
  const Request& request = trace_[i];
  trace_.write_prompt(i, prompt_);
  core::RequestParams params;
  params.n = request.samples;
  params.max_tokens = {request.output_tokens};
  if (uint64_t{request.prompt_tokens} + request.output_tokens < config_.max_model_len.value) ++params.max_tokens;
  params.eos_token_ids = {kEos};
  params.priority = request.priority;
  params.tenant = trace_.tenant_of(i);
  params.sampling.seed = trace_.first_sequence(i);  // comes back in RowOpen with the sample, and says whose row it is
  const auto refusal = gate_.enter({trace_.first_sequence(i)}, prompt_, std::move(params), now,
                                   [this](std::unique_ptr<core::Sequence> s) { scheduler_.accept(std::move(s)); });
  if (refusal) recorder_.refuse(i);
}

std::optional<Work> TwinplaneSystem::next_step(Nanos now) {
  if (!going_on_.empty()) return go_on();
  if (!scheduler_.tick(step_.data(), now)) return std::nullopt;
  const auto& header = *region<wire::StepHeader>(step_, step_layout_.header);
  const auto* const opens = region<wire::RowOpen>(step_, step_layout_.opens);
  for (uint32_t k = 0; k < header.num_opens; ++k) {
    sequences_[opens[k].row] = opens[k].seed + opens[k].stream;
    limits_[opens[k].row] = opens[k].limit;
  }
  num_substeps_ = header.num_substeps;

  std::vector<Sample> samples = no_samples();
  Work work;
  work.swapped_blocks = header.num_swap_outs + header.num_swap_ins;
  const auto* const seqs = region<wire::SeqEntry>(step_, step_layout_.seqs);
  for (uint32_t k = 0; k < header.num_seqs; ++k) {
    const wire::SeqEntry& seq = seqs[k];
    work.add(seq.position, seq.num_tokens);
    if ((seq.flags & wire::kSeqFlagSamples) == 0) continue;
    add_sample(samples, seq.row, seq.position + seq.num_tokens);
  }
  samples_.push_back(std::move(samples));
  return work;
}

// The next substep: each row that has not ended takes the token it sampled last.
Work TwinplaneSystem::go_on() {
  std::vector<Sample> samples = no_samples();
  Work work;
  work.is_substep = true;
  for (const Sample& last : going_on_) {
    work.add(last.position, 1);
    add_sample(samples, last.row, last.position + 1);
  }
  going_on_.clear();
  samples_.push_back(std::move(samples));
  return work;
}

std::vector<TwinplaneSystem::Sample> TwinplaneSystem::no_samples() {
  std::vector<Sample> samples;
  if (!spare_.empty()) {
    samples = std::move(spare_.back());
    spare_.pop_back();
    samples.clear();
  }
  return samples;
}

void TwinplaneSystem::add_sample(std::vector<Sample>& samples, uint32_t row, uint32_t context) const {
  samples.push_back({row, sampled(row, context), context});
}

// As the data plane judges it.
bool TwinplaneSystem::has_ended(const Sample& sample) const {
  return sample.token == kEos || sample.position + 1 == limits_[sample.row];
}

// What the model says after `context` tokens in this row.
int32_t TwinplaneSystem::sampled(uint32_t row, uint32_t context) const {
  const uint64_t sequence = sequences_[row];
  const size_t i = trace_.request_of(sequence);
  const uint32_t nth = context - trace_[i].prompt_tokens;  // output token, from 0
  return nth + 1 >= trace_[i].output_tokens ? kEos
                                            : token_at(output_stream(i, sequence - trace_.first_sequence(i)), nth);
}

void TwinplaneSystem::complete(const Ran& step, Nanos now) {
  std::ranges::copy_if(samples_.front(), std::back_inserter(going_on_),
                       [this](const Sample& sample) { return !has_ended(sample); });
  const bool is_interrupted = scheduler_.interrupted() > core::StepSeq{retired_};
  const bool is_last = substep_ + 1 == num_substeps_ || going_on_.empty() || is_interrupted;
  if (is_last) going_on_.clear();
  write_result(samples_.front(), step, is_last);
  spare_.push_back(std::move(samples_.front()));
  samples_.pop_front();
  scheduler_.retire(result_.data(), now);
  take_events(now);
  if (check_interval_ == 0 || retired_ % check_interval_ != 0) return;
  if (const std::string difference = scheduler_.check(); !difference.empty()) throw std::logic_error(difference);
}

void TwinplaneSystem::write_result(const std::vector<Sample>& samples, const Ran& step, bool is_last) {
  auto* const entries = reinterpret_cast<wire::ResultEntry*>(result_.data() + result_layout_.entries);
  for (size_t k = 0; k < samples.size(); ++k) {
    entries[k] = {.row = samples[k].row, .token = samples[k].token, .logprob = 0, .rank = 1, .flags = 0};
  }
  wire::ResultHeader header{};
  header.step = retired_;
  header.substep = substep_;
  header.received_ns = step.began.value;
  header.finished_ns = step.ended.value;
  header.forward_us = static_cast<uint32_t>((step.ended - step.began).value / 1000);
  header.num_entries = static_cast<uint32_t>(samples.size());
  header.last = is_last;
  retired_ += is_last;
  substep_ = is_last ? 0 : substep_ + 1;
  std::memcpy(result_.data() + result_layout_.header, &header, sizeof(header));
}

void TwinplaneSystem::take_events(Nanos now) {
  events_.flush();
  events_.poll([&](const core::Sequence& sequence, uint32_t from, uint32_t to, bool is_last) {
    const size_t i = trace_.request_of(sequence.id.value);
    RequestRecord& request = recorder_.request(i);
    recorder_.scheduled(i, sequence.first_scheduled);
    recorder_.tokens(sequence.id.value, to - from, now);
    if (!is_last) return;
    gate_.forget(sequence.id);
    request.preemptions += sequence.preemptions;
    request.cached_tokens = std::max(request.cached_tokens, sequence.cached_tokens.value);
    const bool is_complete =
        sequence.finish == core::FinishReason::kEos || sequence.finish == core::FinishReason::kLength;
    if (!is_complete) request.outcome = Outcome::kGivenUp;
    if (--unfinished_[i] != 0) return;
    if (request.outcome == Outcome::kGivenUp) {
      recorder_.give_up(i);
    } else {
      recorder_.finish(i, now);
    }
  });
}

Memory TwinplaneSystem::memory() const {
  const core::Population& population = scheduler_.population();
  const core::BlockManager& blocks = scheduler_.session()->blocks;
  Memory memory;
  memory.allocated = uint64_t{blocks.referenced().value} * pool_.block_size.value;
  memory.capacity = uint64_t{blocks.total().value} * pool_.block_size.value;
  memory.running = static_cast<uint32_t>(population.running.size());
  memory.waiting = static_cast<uint32_t>(population.waiting.size());
  uint64_t unused = 0;  // ends of last blocks; never shared
  for (size_t k = 0; k < population.running.size(); ++k) {
    const core::Sequence& sequence = population.running[k];
    const uint64_t mapped = uint64_t{sequence.num_blocks.value} * pool_.block_size.value;
    // While the first of a group computes the prompt, the others wait for its blocks.
    const uint64_t missing = uint64_t{sequence.missing_blocks.value} * pool_.block_size.value;
    const uint64_t begin = std::max<uint64_t>(sequence.num_computed.value, missing);
    // A token whose block is yet to be taken is not reserved, nor is the last one, which is never stored.
    const uint64_t end = std::min<uint64_t>({sequence.known().value, sequence.kv_limit().value, mapped});
    const uint64_t reserved = end - std::min(end, begin);
    memory.reserved += reserved;
    memory.mapped += mapped;
    unused += mapped - std::max(begin, end);
  }
  memory.held = memory.allocated - memory.reserved - unused;
  return memory;
}

}  // namespace twinplane::simulator
