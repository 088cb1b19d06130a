#include "control_plane/core/plan.hpp"

#include <algorithm>
#include <utility>

#include "control_plane/core/residency.hpp"

namespace twinplane::core {
namespace {

// So many that wait for somebody else's prompt are passed over in one pass; each costs a lookup.
constexpr size_t kMaxPassedOver = 64;

}  // namespace

const StepPlan& Planner::plan(const State& state) {
  plan_.clear();
  hopeless_.clear();
  budget_.emplace(state);
  turns_.begin(state);
  has_offered_ = false;
  passed_over_ = 0;
  Residency residency(state, plan_);
  deal_to_decodes(state, residency);
  chunk_allowance_ = budget_->allowance();
  deal_to_chunks(state);
  is_short_ = residency.is_short();
  return plan_;
}

// INV-6: each sequence with one token to go gets it, before anything else.
void Planner::deal_to_decodes(const State& state, Residency& residency) {
  const TokenCount block_size = state.session.pool.block_size;
  behind_.clear();
  for (size_t i = 0; i < state.running.size(); ++i) {
    if (i + kPrefetchDistance < state.running.size()) state.running[i + kPrefetchDistance].prefetch();
    Sequence& sequence = state.running[i];
    if (plan_.yields.test(i) || sequence.ends_in_flight()) continue;
    if (sequence.distance() != TokenCount{1}) {
      behind_.push_back(i);
      continue;
    }
    const bool grows = sequence.needs_block(block_size);
    if (grows && !residency.grow(i)) continue;
    budget_->take_decode(sequence, {grows});
    plan_.decodes.push_back({&sequence, TokenCount{1}});
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
    // Preempted while a step in flight names it: it may still get a token, and its row is not let go of yet.
    if (sequence.row != kNoRow) break;
    const BlockManager& manager = state.session.blocks;
    Match match = manager.find(sequence, state.session.sent);
    const auto hit = [&] {
      return TokenCount{match.blocks.value * state.session.pool.block_size.value} + match.partial;
    };
    if (is_hopeless(state, sequence, hit()) || manager.is_being_computed(sequence, match)) {
      ++passed_over_;
      continue;
    }
    const BlockCount blocks = blocks_for(sequence.admission_tokens(), state.session.pool.block_size);
    const WordCount words = extra_words(sequence.params, sequence.prompt_tokens, sequence.emitted());
    if (!has_room(state, blocks, match)) break;
    const TokenCount rest = sequence.known() - hit();
    if (budget_->chunk_for(rest, hit()) == TokenCount{0} || !budget_->take_opening(blocks, words)) break;
    has_offered_ = true;
    return Admission{&sequence, match, budget_->take_chunk(rest, hit())};
  }
  return std::nullopt;
}

}  // namespace twinplane::core
