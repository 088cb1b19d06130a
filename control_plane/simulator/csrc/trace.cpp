#include "control_plane/simulator/csrc/trace.hpp"

#include <stdexcept>
#include <string>
#include <utility>

namespace twinplane::simulator {
namespace {

constexpr uint32_t kMaxSamples = 1024;

[[noreturn]] void refuse(size_t i, const std::string& what) {
  throw std::invalid_argument("request " + std::to_string(i) + ": " + what);
}

}  // namespace

Trace::Trace(std::vector<Request> requests, std::vector<std::string> tenants, std::vector<uint64_t> run_offsets,
             std::vector<Run> runs)
    : requests_(std::move(requests)),
      tenants_(std::move(tenants)),
      run_offsets_(std::move(run_offsets)),
      runs_(std::move(runs)) {
  if (run_offsets_.size() != size() + 1 || run_offsets_.front() != 0 || run_offsets_.back() != runs_.size()) {
    throw std::invalid_argument(
        "run_offsets must have one entry more than there are requests, from 0 to the number of runs");
  }
  for (size_t i = 0; i < size(); ++i) {
    const Request& request = requests_[i];
    if (i != 0 && request.arrival < requests_[i - 1].arrival) refuse(i, "arrives before the one ahead of it");
    if (request.prompt_tokens == 0) refuse(i, "has an empty prompt");
    if (request.tenant >= tenants_.size()) refuse(i, "is of a tenant without a name");
    if (request.samples == 0 || request.samples > kMaxSamples) {
      refuse(i, "asks for " + std::to_string(request.samples) + " samples, it can have 1 to " +
                    std::to_string(kMaxSamples));
    }
    if (request.output_tokens == 0) refuse(i, "asks for no output");
    if (uint64_t{request.prompt_tokens} + request.output_tokens > INT32_MAX) refuse(i, "is longer than 2^31 tokens");
    if (run_offsets_[i + 1] < run_offsets_[i]) refuse(i, "has a negative number of runs");
    uint64_t tokens = 0;
    for (const Run& run : runs_of(i)) tokens += run.length;
    if (tokens != request.prompt_tokens) {
      refuse(i, "has a prompt of " + std::to_string(request.prompt_tokens) + " tokens, but runs of " +
                    std::to_string(tokens));
    }
    first_sequence_.push_back(request_of_.size());
    request_of_.insert(request_of_.end(), request.samples, static_cast<uint32_t>(i));
  }
}

void Trace::require_single_samples() const {
  for (size_t i = 0; i < size(); ++i) {
    if (requests_[i].samples != 1) refuse(i, "has several samples, which this system does not know");
  }
}

void Trace::write_prompt(size_t i, std::vector<int32_t>& tokens) const {
  tokens.resize(requests_[i].prompt_tokens);
  int32_t* at = tokens.data();
  for (const Run& run : runs_of(i)) {
    for (uint32_t k = 0; k < run.length; ++k) *at++ = token_at(run.stream, run.first + k);
  }
}

}  // namespace twinplane::simulator
