#include "control_plane/core/plan.hpp"

#include <algorithm>
#include <utility>

#include "control_plane/core/group.hpp"
#include "control_plane/core/residency.hpp"
#include "control_plane/core/substeps.hpp"

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
  looks_.clear();
  Residency residency(state, plan_);
  deal_to_decodes(state, residency);
  chunk_allowance_ = budget_->allowance();
  deal_to_chunks(state);
  is_short_ = residency.is_short();
  plan_.num_substeps = choose_substeps(state, plan_, budget_->load());
  return plan_;
}

// INV-6: each sequence with one token to go gets it, before anything else.
void Planner::deal_to_decodes(const State& state, Residency& residency) {
  behind_.clear();
  const std::span<Sequence* const> running = state.running.members();
  const TokenCount block_size = state.session.pool.block_size;
  DecodeLoad plain;
  for (size_t i = 0; i < running.size();) {
    if (i + kPrefetchDistance < running.size()) running[i + kPrefetchDistance]->prefetch_progress();
    Sequence& sequence = *running[i];
    if (is_plain_decode(sequence) && !plan_.yields.test(i)) {
      const bool enters = sequence.needs_block(block_size);
      if (!enters || residency.grow(i)) {
        if (enters) plan_.entering.push_back(&sequence);
        plan_.plain.push_back(&sequence);
        plain.add(sequence);
      }
      ++i;
      continue;
    }
    const size_t end = sequence.has_group ? end_of_group(state.running, i) : i + 1;
    if (!plan_.yields.test(i) && get_blocks(state, residency, i, end)) {
      for (size_t member = i; member < end; ++member) deal_to(state, member);
    }
    i = end;
  }
  budget_->take_decodes(plain, {static_cast<uint32_t>(plan_.entering.size())});
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

// It has one token to go, and may, and that is all there is to it.
bool Planner::is_plain_decode(const Sequence& sequence) {
  return !sequence.has_group && sequence.distance() == TokenCount{1} && !sequence.ends_in_flight() &&
         sequence.num_computed >= sequence.prompt_tokens;
}

// It has one token to go, and may.
bool Planner::is_decode(const Sequence& sequence) {
  if (sequence.distance() != TokenCount{1} || sequence.ends_in_flight()) return false;
  if (!sequence.has_group) return true;
  // A beam's next token is chosen here, so it can not be relayed.
  const bool waits_for_result = sequence.num_candidates != 0 && sequence.num_pending != TokenCount{0};
  return !sequence.is_following && !waits_for_result;
}

void Planner::deal_to(const State& state, size_t i) {
  Sequence& sequence = state.running[i];
  const bool is_moving = sequence.has_group && sequence.group->beams != nullptr &&
                         sequence.group->beams->moved_from(sequence.index) != BeamSearch::kStays;
  if (is_moving || is_decode(sequence)) {
    plan_.moves_beams = plan_.moves_beams || is_moving;
    budget_->take_decode(sequence, {sequence.needs_block(state.session.pool.block_size) || is_moving});
    plan_.decodes.push_back({&sequence, TokenCount{1}});
  } else if (sequence.ends_in_flight()) {
    sequence.prefetch_whole();  // the next result ends it
  } else if (sequence.distance() > TokenCount{1} && !sequence.is_following) {
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
bool Planner::is_hopeless(const State& state, Candidate& candidate) const {
  const CostModel& costs = state.session.costs;
  const Sequence& sequence = *candidate.sequence;
  if (sequence.deadline() == Nanos{0} || sequence.emitted() != TokenCount{0} || !costs.is_trusted()) return false;
  if (hopeless_.size() == state.config.max_rows) return false;
  const TokenCount step_tokens = std::min(state.config.max_chunk_tokens, state.config.max_step_tokens);
  const double prefill_us =
      costs.prefill_us((sequence.known() - candidate.hit).value, candidate.hit.value, step_tokens.value) /
      costs.margin();
  candidate.estimate = {static_cast<uint64_t>(prefill_us * 1e3)};
  return state.now + candidate.estimate > sequence.deadline();
}

Planner::Candidate Planner::look_at(const State& state, Sequence& sequence) const {
  Candidate found{.sequence = &sequence,
                  .match = state.session.blocks.find(sequence, state.session.sent),
                  .hit = {},
                  .need = need_of(state, sequence),
                  .estimate = {}};
  if (sequence.is_swapped()) found.match.partial = {0};  // what follows comes from the host
  return found;
}

// Whether this step can carry its admission. Only those are passed over that wait for blocks somebody on the device is
// computing right now, or that are about to end.
Planner::Verdict Planner::judge(const State& state, Candidate& candidate) const {
  const Sequence& sequence = *candidate.sequence;
  const auto hit = [&] {
    const Match& match = candidate.match;
    const TokenCount cached{match.blocks.value * state.session.pool.block_size.value + match.partial.value};
    return std::max(cached, sequence.saved_tokens);
  };
  candidate.hit = hit();
  if (is_hopeless(state, candidate)) return Verdict::kHopeless;
  if (state.session.blocks.is_being_computed(sequence, candidate.match)) return Verdict::kPassedOver;
  const Need& need = candidate.need;
  if (!need.is_ready || need.swaps > state.session.capacities.max_swaps - swapped_in_) return Verdict::kNoRoom;
  if (!has_room(state, need, candidate.match)) return Verdict::kNoRoom;
  candidate.hit = hit();  // there may have been no room for a copy
  const TokenCount rest = sequence.known() - candidate.hit;
  if (budget_->chunk_for(rest, candidate.hit, need.swaps) == TokenCount{0}) return Verdict::kNoRoom;
  return budget_->has_opening(need.blocks, need.words) ? Verdict::kFits : Verdict::kNoRoom;
}

// In order of turns: the first that finds no room ends it, whoever is behind.
std::optional<Admission> Planner::next_admission(const State& state) {
  if (is_short_ || state.session.rows.num_free() == 0) return std::nullopt;
  if (std::exchange(has_offered_, false)) turns_.take();
  while (budget_->has_tokens() && passed_over_ != kMaxPassedOver) {
    Sequence* const sequence = turns_.next();
    if (sequence == nullptr) break;
    if (sequence->has_group && sequence->group->first() != sequence) continue;  // it comes with the first of its group
    // Preempted while a step in flight names it: it may still get a token, and its row is not let go of yet.
    if (sequence->row != kNoRow) break;
    Candidate chosen = look_at(state, *sequence);
    const Verdict verdict = judge(state, chosen);
    if (verdict == Verdict::kNoRoom) break;
    if (verdict == Verdict::kHopeless) hopeless_.push_back({sequence, chosen.estimate});
    if (verdict != Verdict::kFits) {
      ++passed_over_;
      continue;
    }
    const size_t overtakes = find_better_cached(state, chosen);
    prefetch_upcoming(state);
    has_offered_ = true;
    swapped_in_ += chosen.need.swaps;
    budget_->take_opening(chosen.need.blocks, chosen.need.words);
    const TokenCount rest = chosen.sequence->known() - chosen.hit;
    return Admission{chosen.sequence, chosen.match, budget_->take_chunk(rest, chosen.hit, chosen.need.swaps),
                     overtakes};
  }
  return std::nullopt;
}

// Those who come next, in this pass or a later one, lie in no cache: they were written when they came.
void Planner::prefetch_upcoming(const State& state) const {
  if (const Sequence* const later = turns_.upcoming(2)) later->prefetch_whole();
  if (const Sequence* const next = turns_.upcoming(1)) state.session.blocks.prefetch_find(*next);
}

// Of the equals of `chosen`, which has the turn and fits, the one of which the cache has the most comes in, if it fits
// as well: what is cached may be gone later. Nobody is overtaken more than max_overtaken times, and few are looked at.
// `chosen` becomes the one; returns how many it overtakes.
size_t Planner::find_better_cached(const State& state, Candidate& chosen) {
  const Line& waiting = state.waiting;
  const size_t first = turns_.place();
  if (state.config.max_overtaken == 0 || chosen.sequence->was_resident) return 0;
  TokenCount most = chosen.hit;
  size_t best = first;
  for (size_t i = first; i + 1 < waiting.size() && i < first + kMaxLooks; ++i) {
    Sequence& next = waiting[i + 1];
    if (waiting[i].overtaken >= state.config.max_overtaken || next.order != chosen.sequence->order) break;
    if (next.was_resident || (next.has_group && next.group->first() != &next)) continue;
    const TokenCount cached = cached_of(state, next);
    if (cached <= most) continue;
    most = cached;
    best = i + 1;
  }
  if (best == first) return 0;
  Candidate better = look_at(state, waiting[best]);
  if (judge(state, better) != Verdict::kFits) return 0;
  chosen = better;
  return best - first;
}

// As of the first time it is asked about in this pass; nothing once enough have been looked up.
TokenCount Planner::cached_of(const State& state, Sequence& sequence) {
  for (const Look& look : looks_) {
    if (look.sequence == &sequence) return look.cached;
  }
  if (looks_.size() == kMaxLooks) return {0};
  const Match match = state.session.blocks.find(sequence, state.session.sent);
  looks_.push_back({&sequence, {match.blocks.value * state.session.pool.block_size.value + match.partial.value}});
  return looks_.back().cached;
}

}  // namespace twinplane::core
