#include "control_plane/core/substeps.hpp"

#include <algorithm>

namespace twinplane::core {
namespace {

// What is taken ahead may evict one in so many of the cached blocks: sequences may end before they need it.
constexpr uint32_t kCachedPerBlockAhead = 8;

// A decode that needs nothing but its row, its blocks and its last token.
bool is_plain(const Sequence& sequence) {
  return !sequence.has_group || (sequence.num_candidates == 0 && !sequence.has_copy_source);
}

// The blocks all decodes enter in a step of so many substeps.
BlockCount growth(const StepPlan& plan, TokenCount block_size, uint32_t num_substeps) {
  BlockCount blocks;
  plan.for_each_decode([&](const Sequence& sequence) {
    const BlockCount needed = blocks_for(sequence.computed_after(num_substeps), block_size);
    blocks += needed - std::min(needed, sequence.num_blocks);
  });
  return blocks;
}

bool has_room(const State& state, const StepPlan& plan, uint32_t num_substeps) {
  const BlockManager& blocks = state.session.blocks;
  const BlockCount room{blocks.pool().free().value + blocks.cached().value / kCachedPerBlockAhead};
  const BlockCount needed = growth(plan, state.session.pool.block_size, num_substeps);
  return needed <= room && needed.value <= state.session.capacities.max_table_writes;
}

// So many substeps are over before the next deadline, if they take what is expected of them.
uint32_t before_deadline(const State& state, const StepLoad& load) {
  if (state.next_deadline == Nanos{0}) return kMaxSubsteps;
  const double left_us =
      static_cast<double>((state.next_deadline - state.now).value) / 1e3;  // what has passed has ended
  const CostModel& costs = state.session.costs;
  const double substeps = left_us / std::max(costs.predict_us(load) * costs.margin(), 1.0);
  return static_cast<uint32_t>(std::clamp(substeps, 1.0, double{kMaxSubsteps}));
}

}  // namespace

uint32_t choose_substeps(const State& state, const StepPlan& plan, const StepLoad& load) {
  uint32_t most = std::min(state.config.max_substeps, state.session.quiet_substeps);
  // Every running sequence decodes: so there are no chunks, nobody yields, and nobody waits for blocks or for a group.
  if (most == 1 || !state.waiting.empty() || plan.num_decodes() != state.running.size()) return 1;
  TokenCount longest;  // tokens that the sequence with the most to go can still get
  bool are_plain = true;
  plan.for_each_decode([&](const Sequence& sequence) {
    are_plain = are_plain && is_plain(sequence);
    longest = std::max(longest, sequence.limit - sequence.known());
  });
  if (!are_plain) return 1;
  most = std::min({most, longest.value, before_deadline(state, load)});
  while (most > 1 && !has_room(state, plan, most)) most /= 2;
  return std::max(most, 1u);
}

}  // namespace twinplane::core
