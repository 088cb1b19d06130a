#include "control_plane/core/residency.hpp"

#include "control_plane/core/group.hpp"

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

// The latest arrival that is not protected yields, with its group if it has one, but never one that is served before
// the one who asks (INV-7). False if the one who asks has to do without: it waits, or it yielded itself.
bool Residency::yield_one_behind(size_t index) {
  while (unasked_ > index + 1) {
    --unasked_;
    if (!plan_.yields.test(unasked_) && !is_same_group(index, unasked_) && !is_protected(unasked_)) {
      yield(unasked_);
      return true;
    }
  }
  // Everyone behind yielded already, or is protected. A protected one owns all it needs to emit its next token and
  // then loses its protection, so waiting for it is finite. With nobody left behind, the one who asks is itself the
  // latest arrival; but the first in line never yields.
  bool is_last = true;
  for (size_t i = index + 1; i < state_.running.size(); ++i) {
    is_last = is_last && (plan_.yields.test(i) || is_same_group(index, i));
  }
  const bool is_first = index == 0 || is_same_group(0, index);
  // The first group alone, with nothing on its way back, can lack blocks only while its beams share in an unlucky way:
  // computed again they fit, as the gate made sure.
  const bool is_stuck =
      is_first && state_.running[index].has_group && state_.session.in_flight() == StepSeq{0} && plan_.yielding.empty();
  if (is_last && (!is_first || is_stuck) && !is_protected(index)) yield(index);
  return false;
}

bool Residency::is_same_group(size_t a, size_t b) const {
  return state_.running[a].has_group && state_.running[a].group == state_.running[b].group;
}

bool Residency::is_protected(size_t index) const {
  const Sequence& sequence = state_.running[index];
  if (!sequence.has_group) return sequence.is_protected;
  bool any = false;
  sequence.group->for_each([&](const Sequence& member) { any = any || member.is_protected; });
  return any;
}

void Residency::yield(size_t index) {
  if (!state_.running[index].has_group) return yield_one(index);
  for (size_t i = index; i-- > 0 && is_same_group(i, index);) yield_one(i);
  for (size_t i = index; i < state_.running.size() && is_same_group(i, index); ++i) yield_one(i);
}

void Residency::yield_one(size_t index) {
  Sequence& victim = state_.running[index];
  plan_.yielding.push_back(&victim);
  plan_.yields.set(index);
  // With a step in flight its blocks are fenced first.
  const BlockCount gained = state_.session.blocks.reclaimable(victim);
  (state_.session.in_flight() == StepSeq{0} ? free_ : soon_free_) += gained;
}

bool has_room(const State& state, const Need& need, Match& match) {
  if (state.session.rows.num_free() < need.rows) return false;
  const BlockManager& manager = state.session.blocks;
  // 0 for the first one in, so whoever fits alone is admitted alone.
  const size_t reserve = (state.running.size() + kResidentsPerReservedBlock - 1) / kResidentsPerReservedBlock;
  const auto needed = [&] {
    return need.blocks - match.blocks + manager.cached_on(match) + BlockCount{static_cast<uint32_t>(reserve)};
  };
  if (match.partial != TokenCount{0} && manager.free() < needed()) match.partial = {0};
  return manager.free() >= needed();
}

}  // namespace twinplane::core
