// The second half of a pass: carry out the plan and write the step.
#include <algorithm>
#include <bit>
#include <cassert>

#include "control_plane/core/scheduler.hpp"

namespace twinplane::core {
namespace {

constexpr double kKeptRate = 1.0 / 8;  // how fast the share that stays cached follows

wire::RowOpen row_open(const Sequence& sequence) {
  const Sampling& sampling = sequence.params.sampling;
  uint32_t flags = 0;
  if (sampling.temperature == 0.0f) flags |= wire::kRowFlagGreedy;
  if (sequence.params.logprobs) flags |= wire::kRowFlagLogprobs;
  return {.row = sequence.row.value,
          .flags = flags,
          .seed = sampling.seed,
          .stream = sampling.stream,
          .temperature = sampling.temperature,
          .top_p = sampling.top_p,
          .min_p = sampling.min_p,
          .top_k = sampling.top_k,
          .repetition_penalty = sampling.repetition_penalty,
          .presence_penalty = sampling.presence_penalty,
          .frequency_penalty = sampling.frequency_penalty,
          .num_candidates = sequence.num_candidates,
          .limit = sequence.limit.value};
}

// A record of token ids; none at all if there are none.
void write_tokens(StepWriter& step, RowId row, wire::ExtraKind kind, const int32_t* tokens, size_t count) {
  if (count == 0) return;
  uint32_t* at = step.extra(row, kind, count).data();
  for (size_t i = 0; i < count; ++i) at[i] = static_cast<uint32_t>(tokens[i]);
}

// Its stop tokens, and the position from which they count; below it they are suppressed.
void write_stops(StepWriter& step, const Sequence& sequence, wire::ExtraKind kind) {
  const auto words = step.extra(sequence.row, kind, 1 + sequence.stops.size());
  words[0] = (sequence.prompt_tokens + sequence.params.min_tokens).value;
  for (size_t i = 0; i < sequence.stops.size(); ++i) words[1 + i] = static_cast<uint32_t>(sequence.stops[i].token);
}

// The row's attachments. Their size is extra_words(): change both together.
void write_extras(StepWriter& step, const Sequence& sequence) {
  const Sampling& sampling = sequence.params.sampling;
  const RowId row = sequence.row;
  const int32_t* const tokens = sequence.tokens;
  const size_t prompt = sequence.prompt_tokens.value;
  if (sampling.repetition_penalty != 1.0f) write_tokens(step, row, wire::kExtraKindPromptHistory, tokens, prompt);
  if (sampling.has_penalties()) {
    // Whole, here; the data plane adds what the row samples from now on.
    write_tokens(step, row, wire::kExtraKindOutputHistory, tokens + prompt, sequence.emitted().value);
  }
  if (!sampling.logit_bias.empty()) {
    uint32_t* at = step.extra(row, wire::kExtraKindLogitBias, 2 * sampling.logit_bias.size()).data();
    for (const auto& [token, bias] : sampling.logit_bias) {
      *at++ = static_cast<uint32_t>(token);
      *at++ = std::bit_cast<uint32_t>(bias);
    }
  }
  write_tokens(step, row, wire::kExtraKindAllowedTokens, sampling.allowed_token_ids.data(),
               sampling.allowed_token_ids.size());
  if (sequence.stops.empty()) return;
  write_stops(step, sequence, wire::kExtraKindStopTokens);
  if (sequence.params.min_tokens.value != 0) write_stops(step, sequence, wire::kExtraKindSuppressedTokens);
}

}  // namespace

// A sequence, or a group as a whole, leaves: what it has computed is saved in the host's pool, or will be computed
// again.
void Scheduler::preempt(std::span<Sequence* const> victims, StepWriter& step) {
  const bool swaps = is_worth_swapping(victims, step);
  for (Sequence* const victim : victims) {
    if (swaps) swap_out(*victim, step);
    population_.running.erase(*victim);
    leave_device(*victim, true);
    put_back(*victim);
    ++victim->preemptions;
    ++counters_.preemptions;
  }
}

// The first of a group saves the shared blocks, the others what they have behind them.
BlockCount Scheduler::first_to_save(const Sequence& sequence) const {
  if (!sequence.has_group || sequence.group->first() == &sequence) return {0};
  return shared_blocks(sequence.prompt_tokens, session_->pool.block_size);
}

// Swapping costs the way there of every block, and back of those that are not cached any more; recomputing costs the
// prefill of these, beside those that run then. What others hold on to is in neither. How much stays cached is taken to
// be what it was lately. Beams are always computed again: who becomes whose child is
// decided by fresh candidates.
bool Scheduler::is_worth_swapping(std::span<Sequence* const> victims, const StepWriter& step) const {
  const TokenCount block_size = session_->pool.block_size;
  BlockCount blocks;
  double recompute_us = 0, swap_us = 0;
  for (const Sequence* const victim : victims) {
    if (is_beam(*victim) || victim->is_following || victim->has_copy_source) return false;
    if (victim->num_computed == TokenCount{0}) return false;
    const BlockCount first = first_to_save(*victim);
    const BlockCount own = blocks_for(victim->num_computed, block_size) - first;
    blocks += own;
    const uint32_t known = first.value * block_size.value;
    const double lost_share = victim->params.uses_cache ? 1 - session_->kept_share : 1;
    swap_us += (1 + lost_share) * session_->costs.swap_us(own);
    recompute_us += lost_share * session_->costs.recompute_us(victim->num_computed.value - known, known,
                                                              config_.max_chunk_tokens.value);
  }
  if (blocks > session_->host.free() || blocks.value > step.room_for_swap_outs()) return false;
  return swap_us < recompute_us;
}

void Scheduler::swap_out(Sequence& sequence, StepWriter& step) {
  sequence.saved_from = first_to_save(sequence);
  sequence.saved_tokens = sequence.num_computed;
  const BlockCount blocks = blocks_for(sequence.num_computed, session_->pool.block_size);
  for (BlockCount i = sequence.saved_from; i < blocks; ++i) {
    const HostBlockId host = session_->host.acquire();
    sequence.saved[(i - sequence.saved_from).value] = host;
    step.swap_out(sequence.blocks[i.value], host);
  }
  sequence.num_saved = blocks - sequence.saved_from;
  counters_.blocks_swapped_out += sequence.num_saved.value;
}

// Its blocks are there: those from `from` on get their content back, and all of it counts as computed.
void Scheduler::swap_in(Sequence& sequence, BlockCount from, StepWriter& step) {
  const StepSeq fence = session_->sent + StepSeq{1};
  for (uint32_t i = 0; i < sequence.num_saved.value; ++i) {
    const BlockCount index = sequence.saved_from + BlockCount{i};
    if (index >= from) step.swap_in(sequence.saved[i], sequence.blocks[index.value]);
    session_->host.release(sequence.saved[i], fence);
  }
  counters_.blocks_swapped_in += sequence.num_saved.value;
  sequence.num_computed = std::max(sequence.num_computed, sequence.saved_tokens);  // the cache may have had more
  sequence.num_saved = {0};
  sequence.saved_tokens = {0};
}

void Scheduler::carry_out(const StepPlan& plan, StepRecord& record, StepWriter& step) {
  for (size_t i = 0; i < plan.yielding.size();) {
    size_t end = i + 1;
    const Sequence& first = *plan.yielding[i];
    while (end < plan.yielding.size() && first.has_group && plan.yielding[end]->group == first.group) ++end;
    preempt({plan.yielding.data() + i, end - i}, step);
    i = end;
  }
  if (plan.moves_beams) {
    for (const Scheduled& decode : plan.decodes) {
      if (is_beam(*decode.sequence)) move_beams(*decode.sequence->group, step);
    }
  }
  session_->blocks.make_room({static_cast<uint32_t>(plan.entering.size())});
  for (Sequence* const sequence : plan.entering) add_block(*sequence, step);
  for (const Scheduled& decode : plan.decodes) {
    if (decode.sequence->needs_block(session_->pool.block_size)) add_block(*decode.sequence, step);
  }
  if (plan.num_substeps > 1) {
    plan.for_each_decode([&](Sequence& sequence) { add_blocks_ahead(sequence, plan.num_substeps, step); });
  }
  schedule_plain(plan.plain, record, step);
  for (const Scheduled& decode : plan.decodes) schedule(decode, 0, record, step);
  record.num_decodes = plan.num_decodes();
  record.num_substeps = plan.num_substeps;
  step.set_substeps(plan.num_substeps);
  for (const Scheduled& chunk : plan.chunks) schedule(chunk, wire::kSeqFlagChunk, record, step);
}

void Scheduler::send(StepWriter& step, Nanos now) {
  session_->rows.closing().for_each([&step](size_t row) { step.close({static_cast<uint32_t>(row)}); });
  session_->rows.clear_closing();
  step.finish(session_->sent, now);

  StepRecord& record = session_->record(session_->sent);
  record.num_results = 0;
  record.load = planner_.load();
  record.load.swaps = step.num_swaps();
  if (record.load.chunks != 0) counters_.chunk_allowance = planner_.chunk_allowance().value;
  if (session_->idle_since != Nanos{0}) counters_.host_gap_ns += (now - session_->idle_since).value;
  session_->idle_since = {0};
  ++session_->sent;
  ++counters_.steps_sent;
}

void Scheduler::admit(const Admission& admission, StepRecord& record, StepWriter& step, Nanos now) {
  Sequence& sequence = *admission.sequence;
  const bool is_new = !sequence.was_resident;
  count_overtaken(sequence, admission.overtakes);
  open_row(sequence, step, now);
  BlockManager& blocks = session_->blocks;
  const bool is_swapped = sequence.is_swapped();
  if (!is_new) note_kept(sequence, admission.match);
  blocks.attach(sequence, admission.match);
  for (BlockCount i; i < sequence.num_blocks; ++i) step.write_table(sequence.row, i, sequence.blocks[i.value]);
  const bool copies = admission.match.partial != TokenCount{0};
  if (copies) blocks.copy_partial(sequence, admission.match, session_->sent);  // before grow() looks for a free block
  add_blocks(sequence, blocks_for(sequence.admission_tokens(), session_->pool.block_size), step);
  if (copies) step.copy(admission.match.partial_block, sequence.blocks[admission.match.blocks.value]);

  counters_.cached_tokens += sequence.num_computed.value;
  if (is_swapped) swap_in(sequence, admission.match.blocks, step);
  if (is_new) {
    sequence.cached_tokens = sequence.num_computed;
    if (shares_) shares_->charge_prompt(sequence.tenant, sequence.distance());
  }
  if (sequence.has_group) {
    sequence.group->for_each([&](Sequence& member) {
      if (&member == &sequence) return;
      admit_follower(member, step, now);
      if (is_swapped) come_back(sequence, member, step);
    });
  }
  schedule({&sequence, admission.tokens}, wire::kSeqFlagChunk, record, step);
}

// A preempted sequence comes back: so much of what it had is still cached.
void Scheduler::note_kept(const Sequence& sequence, const Match& match) {
  const uint32_t had = sequence.known().value - 1;
  if (had == 0 || !sequence.params.uses_cache) return;
  const double kept = std::min(1.0, 1.0 * match.blocks.value * session_->pool.block_size.value / had);
  session_->kept_share += kKeptRate * (kept - session_->kept_share);
}

// It comes in before so many who stand directly before it.
void Scheduler::count_overtaken(const Sequence& sequence, size_t overtakes) {
  if (overtakes == 0) return;
  Line& waiting = population_.waiting;
  const size_t place = waiting.place_of(sequence);
  for (size_t i = place - overtakes; i < place; ++i) ++waiting[i].overtaken;
}

// What the first of a group brings along: a row each, and all blocks it will need for its next token but the shared
// ones.
void Scheduler::admit_follower(Sequence& sequence, StepWriter& step, Nanos now) {
  open_row(sequence, step, now);
  const TokenCount block_size = session_->pool.block_size;
  const BlockCount shared = shared_blocks(sequence.prompt_tokens, block_size);
  session_->blocks.attach_tail(sequence, shared, blocks_for(sequence.admission_tokens(), block_size));
  for (BlockCount i = shared; i < sequence.num_blocks; ++i) step.write_table(sequence.row, i, sequence.blocks[i.value]);
  sequence.is_following = true;
  ++sequence.group->num_following;
}

// Swapped out with the first of its group, which has its blocks again.
void Scheduler::come_back(const Sequence& first, Sequence& member, StepWriter& step) {
  const BlockCount shared = shared_blocks(member.prompt_tokens, session_->pool.block_size);
  session_->blocks.fork(first, member, shared);
  step.fork(member.row, first.row, shared);
  swap_in(member, shared, step);
  stop_following(member);
}

void Scheduler::open_row(Sequence& sequence, StepWriter& step, Nanos now) {
  population_.waiting.erase(sequence);
  gate_.leave_queue(sequence);
  if (!sequence.was_resident) settle(sequence);
  sequence.become(SequenceState::kRunning);
  population_.running.insert(sequence);
  sequence.is_protected = sequence.was_resident;
  if (!sequence.was_resident) sequence.first_scheduled = now;
  sequence.was_resident = true;
  session_->rows.seat(sequence);
  step.open(row_open(sequence));
  write_extras(step, sequence);
}

// The prompt up to its last token is computed by the steps sent so far, this one among them: those who follow share it.
// The block it ends in is copied by the first step that schedules them, which runs behind this one.
void Scheduler::fork_followers(Sequence& first, StepWriter& step) {
  Group& group = *first.group;
  const TokenCount common = first.prompt_tokens - TokenCount{1};
  if (group.num_following == 0 || first.is_following || first.num_computed < common) return;
  if (group.beams != nullptr && !group.beams->is_spread()) return;  // they wait for its token
  const BlockCount shared = shared_blocks(first.prompt_tokens, session_->pool.block_size);
  group.for_each([&](Sequence& member) {
    if (!member.is_following) return;
    session_->blocks.fork(first, member, shared);
    step.fork(member.row, first.row, shared);
    if (member.num_computed != common) {
      session_->blocks.keep_copy_source(first, member, shared);
      member.num_computed = common;
    }
    stop_following(member);
  });
}

// The selection's effect on blocks: who changed hands shares its parent's full blocks and copies the one that is not.
void Scheduler::move_beams(Group& group, StepWriter& step) {
  BeamSearch& beams = *group.beams;
  if (!beams.has_moves()) return;
  BlockManager& blocks = session_->blocks;
  for (uint32_t i = 0; i < beams.width(); ++i) {
    if (beams.moved_from(i) == BeamSearch::kStays) continue;
    Sequence& child = *group.members[i];
    const Sequence& parent = *group.members[beams.moved_from(i)];
    const BlockCount full{parent.num_computed.value / session_->pool.block_size.value};
    if (child.is_following) stop_following(child);
    const BlockId kept = blocks.release_but_one(child, session_->sent);
    blocks.fork(parent, child, full);
    step.fork(child.row, parent.row, full);
    const bool copies = child.num_computed != parent.num_computed;
    child.num_computed = parent.num_computed;
    if (kept != kNoBlock) {
      blocks.take(child, kept);
    } else if (copies) {
      blocks.grow(child);
    } else {
      continue;
    }
    step.write_table(child.row, full, child.blocks[full.value]);
    if (copies) step.copy(parent.blocks[full.value], child.blocks[full.value]);
  }
  beams.forget_moves();
}

void Scheduler::add_block(Sequence& sequence, StepWriter& step) {
  const BlockCount index = sequence.num_blocks;
  step.write_table(sequence.row, index, session_->blocks.grow(sequence));
}

// Until it has so many.
void Scheduler::add_blocks(Sequence& sequence, BlockCount blocks, StepWriter& step) {
  if (sequence.num_blocks >= blocks) return;
  session_->blocks.make_room(blocks - sequence.num_blocks);
  while (sequence.num_blocks < blocks) add_block(sequence, step);
}

// For the tokens that the data plane makes of this step after the first, as far as the sequence can go.
void Scheduler::add_blocks_ahead(Sequence& sequence, uint32_t num_substeps, StepWriter& step) {
  add_blocks(sequence, blocks_for(sequence.computed_after(num_substeps), session_->pool.block_size), step);
}

// What schedule() comes to for decodes that are alone, behind their prompt: they have nothing to copy or to publish,
// and nobody follows them.
void Scheduler::schedule_plain(std::span<Sequence* const> sequences, StepRecord& record, StepWriter& step) {
  step.schedule_decodes(sequences.size(), [&](size_t i) -> StepWriter::Decode {
    Sequence& sequence = *sequences[i];
    const TokenCount at = sequence.num_computed;
    assert(sequence.distance() == TokenCount{1} && !sequence.has_copy_source);
    assert(blocks_for(at + TokenCount{1}, session_->pool.block_size) <= sequence.num_blocks);
    record.owed.add(sequence.row);
    record.rows.push_back(sequence.row);
    ++sequence.num_computed;
    ++sequence.num_pending;
    return {sequence.row, at, at < sequence.num_tokens ? sequence.tokens[at.value] : wire::kNoToken};
  });
}

// The sequence takes part with the tokens from num_computed on. From here they count as computed: every later step runs
// behind this one.
void Scheduler::schedule(const Scheduled& scheduled, uint32_t flags, StepRecord& record, StepWriter& step) {
  Sequence& sequence = *scheduled.sequence;
  const TokenCount first = sequence.num_computed;
  if (sequence.has_copy_source) {
    const uint32_t index = first.value / session_->pool.block_size.value;
    step.copy(sequence.copy_source, sequence.blocks[index]);
    session_->blocks.drop_copy_source(sequence, session_->sent + StepSeq{1});
  }
  const TokenCount past = first + scheduled.tokens;
  assert(past <= sequence.known());
  assert(blocks_for(past, session_->pool.block_size) <= sequence.num_blocks);
  if (past == sequence.known()) {
    flags |= wire::kSeqFlagSamples;
    record.owed.add(sequence.row);
  }
  // A pending token is known to the data plane alone: it is the one its row sampled last.
  const TokenCount inlined = std::min(past, sequence.num_tokens) - std::min(first, sequence.num_tokens);
  step.schedule(sequence.row, first, {sequence.tokens + first.value, inlined.value}, scheduled.tokens, flags);
  record.rows.push_back(sequence.row);

  sequence.num_computed = past;
  if ((flags & wire::kSeqFlagSamples) != 0) ++sequence.num_pending;
  if ((flags & wire::kSeqFlagChunk) != 0) counters_.prompt_tokens_computed += scheduled.tokens.value;
  if (first < sequence.prompt_tokens) session_->blocks.publish(sequence, session_->sent);
  // A first that was preempted may find its prompt in the tree, and more: it then begins behind it.
  if (sequence.has_group && sequence.group->num_following != 0) fork_followers(sequence, step);
}

}  // namespace twinplane::core
