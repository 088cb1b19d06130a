// The second half of a pass: carry out the plan and write the step.
#include <algorithm>
#include <bit>
#include <cassert>

#include "control_plane/core/scheduler.hpp"

namespace twinplane::core {
namespace {

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
          .frequency_penalty = sampling.frequency_penalty};
}

// A record of token ids; none at all if there are none.
void write_tokens(StepWriter& step, RowId row, wire::ExtraKind kind, const int32_t* tokens, size_t count) {
  if (count == 0) return;
  uint32_t* at = step.extra(row, kind, count).data();
  for (size_t i = 0; i < count; ++i) at[i] = static_cast<uint32_t>(tokens[i]);
}

// The row's attachments. Their size is extra_words(): change both together.
void write_extras(StepWriter& step, const Sequence& sequence) {
  const Sampling& sampling = sequence.params.sampling;
  const RowId row = sequence.row;
  const int32_t* const tokens = sequence.tokens.get();
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
  if (sequence.params.min_tokens.value != 0 && !sequence.stops.empty()) {
    const auto words = step.extra(row, wire::kExtraKindSuppressedTokens, 1 + sequence.stops.size());
    words[0] = (sequence.prompt_tokens + sequence.params.min_tokens).value;
    for (size_t i = 0; i < sequence.stops.size(); ++i) words[1 + i] = static_cast<uint32_t>(sequence.stops[i].token);
  }
}

}  // namespace

void Scheduler::preempt(Sequence& victim) {
  population_.running.erase(victim);
  leave_device(victim);
  put_back(victim);
  ++victim.preemptions;
  ++counters_.preemptions;
}

void Scheduler::commit(const StepPlan& plan, std::byte* slot, Nanos now) {
  StepWriter step(slot, session_->capacities);
  StepRecord& record = session_->record(session_->sent);
  record.rows.clear();
  record.load = plan.load;
  if (plan.load.chunks != 0) counters_.chunk_allowance = plan.chunk_allowance.value;
  for (const Scheduled& decode : plan.decodes) {
    Sequence& sequence = *decode.sequence;
    if (sequence.needs_block(session_->pool.block_size)) add_block(sequence, step);
    schedule(decode, 0, record, step);
  }
  for (const Scheduled& chunk : plan.chunks) schedule(chunk, wire::kSeqFlagChunk, record, step);
  for (const Scheduled& first_chunk : plan.admissions) {
    admit(*first_chunk.sequence, step, now);
    schedule(first_chunk, wire::kSeqFlagChunk, record, step);
  }
  session_->rows.closing().for_each([&step](size_t row) { step.close({static_cast<uint32_t>(row)}); });
  session_->rows.clear_closing();
  step.finish(session_->sent, now);

  if (session_->idle_since != Nanos{0}) counters_.host_gap_ns += (now - session_->idle_since).value;
  session_->idle_since = {0};
  ++session_->sent;
  ++counters_.steps_sent;
}

void Scheduler::admit(Sequence& sequence, StepWriter& step, Nanos now) {
  population_.waiting.erase(sequence);
  gate_.leave_queue(sequence);
  sequence.become(SequenceState::kRunning);
  population_.running.insert(sequence);
  sequence.is_protected = sequence.was_resident;
  if (!sequence.was_resident) sequence.first_scheduled = now;
  sequence.was_resident = true;

  session_->rows.seat(sequence);
  step.open(row_open(sequence));
  write_extras(step, sequence);
  const BlockCount blocks = blocks_for(sequence.admission_tokens(), session_->pool.block_size);
  while (sequence.num_blocks < blocks) add_block(sequence, step);
}

void Scheduler::add_block(Sequence& sequence, StepWriter& step) {
  assert(sequence.num_blocks < sequence.block_capacity);
  const BlockId block = session_->blocks.acquire();
  step.write_table(sequence.row, sequence.num_blocks, block);
  sequence.blocks[sequence.num_blocks.value] = block;
  ++sequence.num_blocks;
}

// The sequence takes part with the tokens from num_computed on. From here they count as computed: every later step runs
// behind this one.
void Scheduler::schedule(const Scheduled& scheduled, uint32_t flags, StepRecord& record, StepWriter& step) {
  Sequence& sequence = *scheduled.sequence;
  const TokenCount first = sequence.num_computed;
  const TokenCount past = first + scheduled.tokens;
  assert(past <= sequence.known());
  assert(blocks_for(past, session_->pool.block_size) <= sequence.num_blocks);
  if (past == sequence.known()) {
    flags |= wire::kSeqFlagSamples;
    record.samples.set(sequence.row.value);
  }
  // A pending token is known to the data plane alone: it is the one its row sampled last.
  const TokenCount inlined = std::min(past, sequence.num_tokens) - std::min(first, sequence.num_tokens);
  step.schedule(sequence.row, first, {sequence.tokens.get() + first.value, inlined.value}, scheduled.tokens, flags);
  record.rows.push_back(sequence.row);

  sequence.num_computed = past;
  if ((flags & wire::kSeqFlagSamples) != 0) ++sequence.num_pending;
  if ((flags & wire::kSeqFlagChunk) != 0) counters_.prompt_tokens_computed += scheduled.tokens.value;
}

}  // namespace twinplane::core
