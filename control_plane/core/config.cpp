#include "control_plane/core/config.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace twinplane::core {
namespace {

// Words of logit edits (bias, allowed, suppressed tokens) a session makes room for beside the histories.
constexpr uint32_t kLogitEditWords = 65'536;
// Record headers {row, kind, n} of every kind of extra one row can have.
constexpr uint32_t kExtraHeaderWords = 3 * 6;

void require(const char* what, uint64_t value, uint64_t least, const std::string& why) {
  if (value >= least) return;
  throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) + ", it must be at least " +
                              std::to_string(least) + ": " + why);
}

// Blocks of the longest request this pool can serve.
BlockCount longest_request(const Config& config, const Pool& pool) {
  return std::min(blocks_for(config.max_model_len, pool.block_size), pool.num_blocks);
}

// Blocks of a group of such requests: all rows of it, or all of the pool.
BlockCount longest_group(const Config& config, const Pool& pool) {
  const uint64_t blocks = uint64_t{longest_request(config, pool).value} * config.max_rows;
  return {static_cast<uint32_t>(std::min<uint64_t>(blocks, pool.num_blocks.value))};
}

}  // namespace

void Config::validate() const {
  require("max_rows", max_rows, 1, "a request needs a row");
  require("max_chunk_tokens", max_chunk_tokens.value, 1, "a prompt is computed in chunks of so many tokens");
  require("depth", depth, 1, "at least one step must be in flight");
  require("max_substeps", max_substeps, 1, "a step gives each sequence a token");
  if (max_substeps > kMaxSubsteps) {
    throw std::invalid_argument("max_substeps is " + std::to_string(max_substeps) + ", it must be at most " +
                                std::to_string(kMaxSubsteps));
  }
  require("max_waiting_requests", max_waiting_requests, 1, "every request waits before it runs");
  require("max_model_len", max_model_len.value, 2, "one prompt token and one new token");
  require("max_step_tokens", max_step_tokens.value, max_rows,
          "every running request (max_rows) gets its token in every step");
  for (const auto& [tenant, weight] : tenant_weights) {
    if (weight != 0 && weight <= kMaxTenantWeight && tenant.size() <= kMaxTenantName) continue;
    throw std::invalid_argument("the weight of tenant '" + tenant + "' is " + std::to_string(weight) +
                                ", it must be from 1 to " + std::to_string(kMaxTenantWeight) +
                                ", and the name at most " + std::to_string(kMaxTenantName) + " characters long");
  }
}

wire::Capacities capacities_for(const Config& config, const Pool& pool) {
  // Two slots beyond the depth: one being filled while the data plane still reads the oldest, one to spare.
  const uint32_t ring_depth = config.depth + 2;
  // Room for a growth of every row, and for admissions worth a whole step: each begins a block.
  const uint32_t admissions = blocks_for(config.max_step_tokens, pool.block_size).value + config.max_rows;
  const uint32_t longest = longest_group(config, pool).value;
  return {.ring_depth = ring_depth,
          .max_rows = config.max_rows,
          .max_step_tokens = config.max_step_tokens.value,
          .max_table_writes = config.max_rows + longest + admissions,
          .max_copies = config.max_rows,
          .max_extra_words = config.max_model_len.value + kExtraHeaderWords + kLogitEditWords,
          .max_results = config.max_rows,
          .max_swaps = std::min(longest, pool.num_host_blocks.value),
          .max_candidates = config.max_rows * kMaxCandidates};
}

void check_capacities(const Config& config, const Pool& pool, const wire::Capacities& capacities) {
  require("num_blocks", pool.num_blocks.value, 1, "the data plane offers no KV blocks");
  require("block_size", pool.block_size.value, 1, "the data plane offers empty KV blocks");
  require("capacity ring_depth", capacities.ring_depth, config.depth + 1, "depth steps in flight and one being filled");
  require("capacity max_rows", capacities.max_rows, config.max_rows, "max_rows of the scheduler");
  require("capacity max_step_tokens", capacities.max_step_tokens, config.max_step_tokens.value,
          "max_step_tokens of the scheduler");
  require("capacity max_table_writes", capacities.max_table_writes,
          uint64_t{config.max_rows} + longest_group(config, pool).value,
          "every row may enter a block in the step that admits a group of requests of max_model_len");
  require("capacity max_swaps", capacities.max_swaps, std::min(longest_group(config, pool), pool.num_host_blocks).value,
          "a group that was swapped out comes back in one step");
  require("capacity max_extra_words", capacities.max_extra_words,
          uint64_t{config.max_model_len.value} + kExtraHeaderWords,
          "penalties need the history of a request of max_model_len");
  require("capacity max_copies", capacities.max_copies, config.max_rows, "every row may copy a block in one step");
  require("capacity max_candidates", capacities.max_candidates, uint64_t{config.max_rows} * kMaxCandidates,
          "every row may belong to a beam search");
  require("capacity max_results", capacities.max_results, config.max_rows, "every row may sample in one step");
}

}  // namespace twinplane::core
