#include "control_plane/core/residency.hpp"

namespace twinplane::core {

namespace {

// One block is kept free for so many resident sequences when another one is admitted. A sequence enters a block every
// block_size tokens, so this lets the present ones grow for about block_size / kResidentsPerReservedBlock steps before
// anyone has to yield; without it, admission and preemption would take turns.
constexpr size_t kResidentsPerReservedBlock = 4;

}  // namespace

Residency::Residency(const State& state, StepPlan& plan)
    : state_(state),
      plan_(plan),
      free_(state.session.blocks.free()),
      soon_free_(state.session.blocks.soon_free()),
      unasked_(state.running.size()) {}

bool Residency::grow(size_t index) {
  while (free_ == BlockCount{0}) {
    is_short_ = true;
    if (claimed_ < soon_free_) {  // blocks already on their way back are enough: nobody has to yield
      ++claimed_;
      return false;
    }
    if (!yield_one_behind(index)) return false;
  }
  --free_;
  return true;
}

// The latest arrival that is not protected yields, but never one that is served before the one who asks (INV-7). False
// if the one who asks has to do without: it waits, or it yielded itself.
bool Residency::yield_one_behind(size_t index) {
  while (unasked_ > index + 1) {
    --unasked_;
    if (!state_.running[unasked_].is_protected) {
      yield(unasked_);
      return true;
    }
  }
  // Everyone behind yielded already, or is protected. A protected one owns all it needs to emit its next token and
  // then loses its protection, so waiting for it is finite. With nobody left behind, the one who asks is itself the
  // latest arrival; but the first in line never yields.
  bool is_last = true;
  for (size_t i = index + 1; i < state_.running.size(); ++i) is_last = is_last && plan_.yields.test(i);
  if (is_last && index != 0 && !state_.running[index].is_protected) yield(index);
  return false;
}

void Residency::yield(size_t index) {
  Sequence& victim = state_.running[index];
  plan_.yielding.push_back(&victim);
  plan_.yields.set(index);
  // With a step in flight its blocks are fenced first.
  const BlockCount gained = state_.session.blocks.reclaimable(victim);
  (state_.session.in_flight() == StepSeq{0} ? free_ : soon_free_) += gained;
}

bool has_room(const State& state, BlockCount blocks, Match& match) {
  if (state.session.rows.num_free() == 0) return false;
  const BlockManager& manager = state.session.blocks;
  // 0 for the first one in, so whoever fits alone is admitted alone.
  const size_t reserve = (state.running.size() + kResidentsPerReservedBlock - 1) / kResidentsPerReservedBlock;
  const auto needed = [&] {
    return blocks - match.blocks + manager.cached_on(match) + BlockCount{static_cast<uint32_t>(reserve)};
  };
  if (match.partial != TokenCount{0} && manager.free() < needed()) match.partial = {0};
  return manager.free() >= needed();
}

}  // namespace twinplane::core
