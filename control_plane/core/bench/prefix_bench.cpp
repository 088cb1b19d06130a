// Measures a hit in the prefix cache: match + pin of a prompt that is cached whole, one of as many as the pool holds,
// so that neither the tree nor the prompt is in the processor's caches by chance. Every eighth prompt shares its first
// half with its neighbour. Usage: prefix_bench TOKENS CACHED_BLOCKS ROUNDS BLOCK_SIZE; prints one JSON object.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "control_plane/core/bench/timings.hpp"
#include "control_plane/core/prefix_tree.hpp"
#include "shared/csrc/clock.hpp"

namespace twinplane::core {
namespace {

struct Options {
  uint32_t tokens, cached_blocks, rounds, block_size;
};

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        blocks_per_prompt_(std::max(1u, options.tokens / options.block_size)),
        pool_({std::max(options.cached_blocks, blocks_per_prompt_)}),
        tree_(pool_, {options.block_size}, 1),
        ids_(blocks_per_prompt_),
        times_(options.rounds) {
    while (pool_.free().value >= blocks_per_prompt_) insert();
  }

  void run() {
    for (uint32_t i = 0; i < options_.rounds; ++i) hit(prompts_[dice_() % prompts_.size()]);
    std::printf(
        "{\"tokens\": %u, \"cached_blocks\": %u, \"prompts\": %zu, \"p50_us\": %.3f, \"p99_us\": %.3f, \"max_us\": "
        "%.3f}\n",
        options_.tokens, tree_.total().value, prompts_.size(), times_.us_at(0.5), times_.us_at(0.99),
        times_.us_at(1.0));
  }

 private:
  void insert() {
    std::vector<int32_t> prompt(size_t{blocks_per_prompt_} * options_.block_size);
    for (int32_t& token : prompt) token = static_cast<int32_t>(dice_() % 50'000);
    if (prompts_.size() % 8 == 7) {
      std::copy_n(prompts_.back().begin(), blocks_per_prompt_ / 2 * options_.block_size, prompt.begin());
    }
    const Match match = tree_.match({}, prompt, ++step_);
    const NodeId node = tree_.pin(match, ids_.data());
    const BlockCount found = match.blocks;
    for (uint32_t i = found.value; i < blocks_per_prompt_; ++i) ids_[i] = pool_.acquire();
    const auto [end, taken] = tree_.append(node, {}, prompt.data(), ids_.data(), found, {blocks_per_prompt_}, step_);
    for (uint32_t i = found.value; i < taken.value; ++i) pool_.hand_over(ids_[i]);
    tree_.cool(end);
    tree_.thaw(end);
    prompts_.push_back(std::move(prompt));
  }

  void hit(const std::vector<int32_t>& prompt) {
    ++step_;
    const uint64_t start_ns = shm::now_ns();
    const Match match = tree_.match({}, prompt, step_);
    const NodeId node = tree_.pin(match, ids_.data());
    times_.add(shm::now_ns() - start_ns);
    if (match.blocks.value != blocks_per_prompt_) std::fprintf(stderr, "a prompt is not found\n"), std::abort();
    tree_.cool(node);
    tree_.thaw(node);
  }

  Options options_;
  uint32_t blocks_per_prompt_;
  BlockPool pool_;
  PrefixTree tree_;
  std::vector<BlockId> ids_;
  std::vector<std::vector<int32_t>> prompts_;
  Timings times_;
  std::mt19937 dice_{1};
  StepSeq step_;
};

}  // namespace
}  // namespace twinplane::core

int main(int argc, char** argv) {
  const auto [tokens, cached_blocks, rounds, block_size] =
      twinplane::core::arguments<4>(argc, argv, "TOKENS CACHED_BLOCKS ROUNDS BLOCK_SIZE");
  twinplane::core::Bench({tokens, cached_blocks, rounds, block_size}).run();
}
