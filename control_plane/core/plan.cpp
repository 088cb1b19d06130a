#include "control_plane/core/plan.hpp"

#include <algorithm>
#include <utility>

#include "control_plane/core/group.hpp"
#include "control_plane/core/residency.hpp"

namespace twinplane::core {
namespace {

// So many that wait for somebody else's prompt are passed over in one pass; each costs a lookup.
constexpr size_t kMaxPassedOver = 64;

// Those of a group stand one behind the other in each line.
size_t end_of_group(const Line& line, size_t begin) {
  size_t end = begin + 1;
  while (end < line.size() && line[end].group == line[begin].group) ++end;
  return end;
}

// What a waiting sequence and those that come with it need.
Need need_of(const State& state, const Sequence& first) {
  const TokenCount block_size = state.session.pool.block_size;
  Need need{.blocks = blocks_for(first.admission_tokens(), block_size),
            .words = extra_words(first.params, first.prompt_tokens, first.emitted()),
            .swaps = first.num_saved.value};
  if (!first.has_group) return need;
  const BlockCount shared = shared_blocks(first.prompt_tokens, block_size);
  first.group->for_each([&](const Sequence& member) {
    if (&member == &first) return;
    ++need.rows;
    need.swaps += member.num_saved.value;
    need.blocks += blocks_for(member.admission_tokens(), block_size) - shared;
    need.words += extra_words(member.params, member.prompt_tokens, member.emitted());
    need.is_ready = need.is_ready && member.row == kNoRow;
  });
  return need;
}

}  // namespace

const StepPlan& Planner::plan(const State& state) {
  plan_.clear();
  hopeless_.clear();
  budget_.emplace(state);
  turns_.begin(state);
  has_offered_ = false;
  passed_over_ = 0;
  swapped_in_ = 0;
  Residency residency(state, plan_);
  deal_to_decodes(state, residency);
  chunk_allowance_ = budget_->allowance();
  deal_to_chunks(state);
  is_short_ = residency.is_short();
  return plan_;
}

// INV-6: each sequence with one token to go gets it, before anything else.
void Planner::deal_to_decodes(const State& state, Residency& residency) {
  behind_.clear();
  for (size_t i = 0; i < state.running.size();) {
    if (i + kPrefetchDistance < state.running.size()) state.running[i + kPrefetchDistance].prefetch();
    const size_t end = state.running[i].has_group ? end_of_group(state.running, i) : i + 1;
    if (!plan_.yields.test(i) && get_blocks(state, residency, i, end)) {
      for (size_t member = i; member < end; ++member) deal_to(state, member);
    }
    i = end;
  }
}

// The blocks that sequences [begin, end) of the line, which go together, enter in this step; false if they do not go.
bool Planner::get_blocks(const State& state, Residency& residency, size_t begin, size_t end) {
  const TokenCount block_size = state.session.pool.block_size;
  const Sequence& first = state.running[begin];
  const BeamSearch* const beams = first.has_group ? first.group->beams.get() : nullptr;
  for (size_t i = begin; i < end; ++i) {
    const Sequence& sequence = state.running[i];
    if (beams != nullptr && beams->moved_from(sequence.index) != BeamSearch::kStays) {
      if (state.session.blocks.has_exclusive_last(sequence)) continue;  // it has one to copy to, or to go on in
    } else if (!is_decode(sequence) || !sequence.needs_block(block_size)) {
      continue;
    }
    if (!residency.grow(i)) return false;
  }
  return true;
}

// It has one token to go, and may.
bool Planner::is_decode(const Sequence& sequence) {
  // A beam's next token is chosen here, so it can not be relayed.
  const bool waits_for_result = sequence.num_candidates != 0 && sequence.num_pending != TokenCount{0};
  return sequence.distance() == TokenCount{1} && !sequence.ends_in_flight() && !sequence.is_following &&
         !waits_for_result;
}

void Planner::deal_to(const State& state, size_t i) {
  Sequence& sequence = state.running[i];
  const bool is_moving = sequence.has_group && sequence.group->beams != nullptr &&
                         sequence.group->beams->moved_from(sequence.index) != BeamSearch::kStays;
  if (is_moving || is_decode(sequence)) {
    budget_->take_decode(sequence, {sequence.needs_block(state.session.pool.block_size) || is_moving});
    plan_.decodes.push_back({&sequence, TokenCount{1}});
  } else if (sequence.distance() > TokenCount{1} && !sequence.ends_in_flight() && !sequence.is_following) {
    behind_.push_back(i);
  }
}

void Planner::deal_to_chunks(const State& state) {
  for (const size_t i : behind_) {
    if (plan_.yields.test(i)) continue;
    Sequence& sequence = state.running[i];
    const TokenCount tokens = budget_->take_chunk(sequence.distance(), sequence.num_computed);
    if (tokens == TokenCount{0}) return;
    plan_.chunks.push_back({&sequence, tokens});
  }
}

// INV-8: no prefill is spent on a request that can not have its first token in time even if the device were its alone
// from now on. That is said by the cost model, so only once it is trusted, and with its margin in the request's favour.
bool Planner::is_hopeless(const State& state, Sequence& sequence, TokenCount computed) {
  const CostModel& costs = state.session.costs;
  if (sequence.deadline() == Nanos{0} || sequence.emitted() != TokenCount{0} || !costs.is_trusted()) return false;
  if (hopeless_.size() == state.config.max_rows) return false;
  const TokenCount step_tokens = std::min(state.config.max_chunk_tokens, state.config.max_step_tokens);
  const double prefill_us =
      costs.prefill_us((sequence.known() - computed).value, computed.value, step_tokens.value) / costs.margin();
  const Nanos estimate{static_cast<uint64_t>(prefill_us * 1e3)};
  if (state.now + estimate <= sequence.deadline()) return false;
  hopeless_.push_back({&sequence, estimate});
  return true;
}

// In order of turns: the first that finds no room ends it, whoever is behind. Only those are passed over that wait for
// blocks somebody on the device is computing right now, or that are about to end.
std::optional<Admission> Planner::next_admission(const State& state) {
  if (is_short_ || state.session.rows.num_free() == 0) return std::nullopt;
  if (std::exchange(has_offered_, false)) turns_.take();
  while (budget_->has_tokens() && passed_over_ != kMaxPassedOver) {
    Sequence* const candidate = turns_.next();
    if (candidate == nullptr) break;
    Sequence& sequence = *candidate;
    if (sequence.has_group && sequence.group->first() != &sequence) continue;  // it comes with the first of its group
    // Preempted while a step in flight names it: it may still get a token, and its row is not let go of yet.
    if (sequence.row != kNoRow) break;
    const BlockManager& manager = state.session.blocks;
    Match match = manager.find(sequence, state.session.sent);
    if (sequence.is_swapped()) match.partial = {0};  // what follows comes from the host
    const auto hit = [&] {
      const TokenCount cached{match.blocks.value * state.session.pool.block_size.value + match.partial.value};
      return std::max(cached, sequence.saved_tokens);
    };
    if (is_hopeless(state, sequence, hit()) || manager.is_being_computed(sequence, match)) {
      ++passed_over_;
      continue;
    }
    const Need need = need_of(state, sequence);
    if (!need.is_ready || need.swaps > state.session.capacities.max_swaps - swapped_in_) break;
    if (!has_room(state, need, match)) break;
    const TokenCount rest = sequence.known() - hit();
    if (budget_->chunk_for(rest, hit(), need.swaps) == TokenCount{0} || !budget_->take_opening(need.blocks, need.words))
      break;
    has_offered_ = true;
    swapped_in_ += need.swaps;
    return Admission{&sequence, match, budget_->take_chunk(rest, hit(), need.swaps)};
  }
  return std::nullopt;
}

}  // namespace twinplane::core
