// What the operator sets, what a data plane offers, and what a session must be able to carry for both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "control_plane/core/types.hpp"
#include "shared/csrc/wire.hpp"

namespace twinplane::core {

// Who comes in next. All of them are first come, first served among equals.
enum class Policy : uint8_t {
  kFcfs,      // everyone is equal
  kPriority,  // the higher priority
  kFair,      // the least served tenant (fair_share.hpp); of its requests the higher priority
};

inline constexpr size_t kMaxTenantName = 64;
inline constexpr uint32_t kMaxTenantWeight = 1000;

struct Config {
  uint32_t max_rows = 64;                    // sequences resident at once
  TokenCount max_step_tokens{2048};          // tokens one step computes
  TokenCount max_chunk_tokens{512};          // of these, at most so many for one prompt
  uint32_t depth = 2;                        // steps in flight
  uint32_t max_substeps = 1;                 // tokens per sequence that the data plane may make of one step
  uint32_t max_waiting_requests = 1024;      // bounds of the waiting queue
  uint64_t max_waiting_tokens = 1ull << 20;  // known tokens of all that wait
  TokenCount max_model_len{2048};            // context limit: prompt + max_tokens
  uint32_t itl_target_us = 0;                // inter-token latency to keep prompts within; 0 = none
  Policy policy = Policy::kPriority;
  std::vector<std::pair<std::string, uint32_t>> tenant_weights;  // shares of the named tenants; others have 1
  // So many times may a newcomer be overtaken by equals of which the prefix cache has more.
  uint32_t max_overtaken = 0;

  // Requests in the core at once: submitting stops at max_waiting_requests, at most max_rows are resident, and
  // preemption moves a request between the two without adding one. All tables are sized by it (INV-11).
  uint32_t max_live() const { return max_waiting_requests + max_rows; }

  // Throws std::invalid_argument naming the option, its value and what to change.
  void validate() const;
};

// Beyond this the work between two steps is next to nothing already.
inline constexpr uint32_t kMaxSubsteps = 64;

// Candidates a row may return with each token.
inline constexpr uint32_t kMaxCandidates = 64;

struct Pool {
  BlockCount num_blocks;
  TokenCount block_size;
  BlockCount num_host_blocks;  // of the swap pool; 0 = preemption recomputes
  uint32_t swap_block_ns = 0;  // what moving one block there and back again takes; 0 = nobody knows yet
};

// Capacities that suit config and pool.
wire::Capacities capacities_for(const Config& config, const Pool& pool);

// The least with which every step the planner may want can be written, and one request of max_model_len always
// fits. Throws std::invalid_argument naming the capacity, its value and the least.
void check_capacities(const Config& config, const Pool& pool, const wire::Capacities& capacities);

}  // namespace twinplane::core
