#include "control_plane/core/plan.hpp"

#include "control_plane/core/budget.hpp"
#include "control_plane/core/residency.hpp"

namespace twinplane::core {

const StepPlan& Planner::plan(const State& state) {
  plan_.clear();
  Residency residency(state, plan_);
  Budget budget(state);
  deal_to_decodes(state, residency, budget);
  plan_.chunk_allowance = budget.allowance();
  deal_to_chunks(state, budget);
  if (!residency.is_short()) admit(state, residency, budget);
  plan_.load = budget.load();
  return plan_;
}

// INV-6: each sequence with one token to go gets it, before anything else.
void Planner::deal_to_decodes(const State& state, Residency& residency, Budget& budget) {
  const TokenCount block_size = state.session.pool.block_size;
  behind_.clear();
  for (size_t i = 0; i < state.running.size(); ++i) {
    Sequence& sequence = state.running[i];
    if (plan_.yields.test(i) || sequence.ends_in_flight()) continue;
    if (sequence.distance() != TokenCount{1}) {
      behind_.push_back(i);
      continue;
    }
    const bool grows = sequence.needs_block(block_size);
    if (grows && !residency.grow(i)) continue;
    budget.take_decode(sequence, {grows});
    plan_.decodes.push_back({&sequence, TokenCount{1}});
  }
}

void Planner::deal_to_chunks(const State& state, Budget& budget) {
  for (const size_t i : behind_) {
    if (plan_.yields.test(i)) continue;
    Sequence& sequence = state.running[i];
    const TokenCount tokens = budget.chunk_for(sequence);
    if (tokens == TokenCount{0}) return;
    budget.take_chunk(sequence, tokens);
    plan_.chunks.push_back({&sequence, tokens});
  }
}

// First come, first served: the first that has to wait ends it, whoever is behind.
void Planner::admit(const State& state, Residency& residency, Budget& budget) {
  for (size_t i = 0; i < state.waiting.size() && budget.has_tokens(); ++i) {
    Sequence& sequence = state.waiting[i];
    // Preempted while a step in flight names it: it may still get a token, and its row is not let go of yet.
    if (sequence.row != kNoRow) return;
    const BlockCount blocks = blocks_for(sequence.admission_tokens(), state.session.pool.block_size);
    const WordCount words = extra_words(sequence.params, sequence.prompt_tokens, sequence.emitted());
    const TokenCount tokens = budget.chunk_for(sequence);
    if (tokens == TokenCount{0} || !residency.admit(sequence) || !budget.take_opening(blocks, words)) return;
    budget.take_chunk(sequence, tokens);
    plan_.admissions.push_back({&sequence, tokens});
  }
}

}  // namespace twinplane::core
