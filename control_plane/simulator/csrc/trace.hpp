// What is replayed: requests in order of arrival, and the tokens of their prompts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "control_plane/core/types.hpp"

namespace twinplane::simulator {

using core::Nanos;

// `length` tokens of an endless token stream, from `first` on. Prompts that name the same stretch of the same stream
// have the same tokens there: that is how shared prefixes are written down.
struct Run {
  uint64_t stream;
  uint64_t first;
  uint32_t length;
};

struct Request {
  Nanos arrival;
  uint32_t prompt_tokens;  // >= 1, the sum of its runs
  uint32_t output_tokens;  // >= 1
  int32_t priority;
  uint32_t tenant;   // index of its name
  uint32_t samples;  // >= 1 answers to the same prompt, each a sequence
};

// The token at `position` of a stream: as good as random, so that different streams share no block.
inline int32_t token_at(uint64_t stream, uint64_t position) {
  // Finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) over the pair.
  uint64_t x = stream * 0x9e3779b97f4a7c15ull + position * 0xd1342543de82ef95ull + 0x2545f4914f6cdd1dull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<int32_t>((x ^ (x >> 31)) & 0x3fffffff);
}

class Trace {
 public:
  // Request i's prompt is runs[run_offsets[i]] up to runs[run_offsets[i + 1]]. Throws std::invalid_argument naming the
  // first request that makes no sense.
  Trace(std::vector<Request> requests, std::vector<std::string> tenants, std::vector<uint64_t> run_offsets,
        std::vector<Run> runs);

  size_t size() const { return requests_.size(); }
  const Request& operator[](size_t i) const { return requests_[i]; }
  // Sequences are numbered through: those of request i are first_sequence(i) and the samples - 1 behind it.
  uint64_t first_sequence(size_t i) const { return first_sequence_[i]; }
  size_t num_sequences() const { return request_of_.size(); }
  size_t request_of(uint64_t sequence) const { return request_of_[sequence]; }

  // For systems that know no samples. Throws std::invalid_argument if a request has several.
  void require_single_samples() const;

  const std::string& tenant_of(size_t i) const { return tenants_[requests_[i].tenant]; }
  std::span<const Run> runs_of(size_t i) const {
    return std::span(runs_).subspan(run_offsets_[i], run_offsets_[i + 1] - run_offsets_[i]);
  }

  // Into a buffer that is used again for the next prompt.
  void write_prompt(size_t i, std::vector<int32_t>& tokens) const;

 private:
  std::vector<Request> requests_;
  std::vector<std::string> tenants_;
  std::vector<uint64_t> run_offsets_;
  std::vector<Run> runs_;
  std::vector<uint64_t> first_sequence_;
  std::vector<uint32_t> request_of_;  // by sequence
};

}  // namespace twinplane::simulator
