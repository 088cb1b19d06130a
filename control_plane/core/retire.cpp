// Results: tokens to their sequences, and the fences of retired steps opened. What the peer wrote is checked before it
// is used.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <sstream>

#include "control_plane/core/scheduler.hpp"

namespace twinplane::core {

// Out of line, so that what never happens takes no room in the loops that check for it.
template <typename... Parts>
[[gnu::cold, gnu::noinline]] void Scheduler::fault(const Parts&... parts) {
  session_->has_failed = true;
  std::ostringstream message;
  message << "the data plane broke the protocol: ";
  (message << ... << parts);
  throw ProtocolFault(message.str());
}

void Scheduler::retire(const std::byte* slot, Nanos now) {
  if (!session_) throw std::logic_error("a result without a session");
  if (session_->has_failed) return;
  const wire::ResultSlotLayout layout(session_->capacities);
  wire::ResultHeader header;
  std::memcpy(&header, slot + layout.header, sizeof(header));
  if (session_->in_flight() == StepSeq{0}) fault("a result of step ", header.step, ", but no step is in flight");
  if (header.step != session_->retired.value) {
    fault("a result of step ", header.step, ", but the oldest in flight is ", session_->retired.value);
  }
  if (header.status != wire::kStepStatusOk) {
    session_->has_failed = true;  // the cause comes over the lifeline, and detach() with it
    return;
  }
  if (header.num_entries > session_->capacities.max_results) {
    fault("a result with ", header.num_entries, " entries, its slot holds ", session_->capacities.max_results);
  }
  if (header.num_candidates > session_->capacities.max_candidates) {
    fault("a result with ", header.num_candidates, " candidates, its slot holds ", session_->capacities.max_candidates);
  }
  StepRecord& record = session_->record(session_->retired);
  if (header.substep != record.num_results || record.num_results == record.num_substeps) {
    fault("result ", header.substep, " of step ", header.step, ", which has ", record.num_substeps, " substeps and ",
          record.num_results, " results");
  }
  take_entries({reinterpret_cast<const wire::ResultEntry*>(slot + layout.entries), header.num_entries},
               {reinterpret_cast<const wire::Candidate*>(slot + layout.candidates), header.num_candidates}, record,
               now);
  check_owed(record);
  learn(record, header, now);
  ++record.num_results;
  ++counters_.results_taken;
  counters_.apply_us += header.apply_us;
  counters_.forward_us += header.forward_us;
  counters_.sample_us += header.sample_us;
  if (header.last != 0) {
    complete_step(record, header, now);
  } else {
    go_on(record);
  }
}

void Scheduler::take_entries(std::span<const wire::ResultEntry> entries, std::span<const wire::Candidate> candidates,
                             StepRecord& record, Nanos now) {
  const std::span<const Rows::Seat> seats = session_->rows.seats();
  const std::span<const RowId> rows = record.rows;
  for (size_t i = 0; i < entries.size(); ++i) {
    // Tokens come in the order in which their rows were scheduled, or nearly so.
    if (i + kPrefetchDistance < rows.size()) prefetch_owner(seats[rows[i + kPrefetchDistance].value]);
    // Each field is read once, because the peer could write while it is checked.
    const RowId row{entries[i].row};
    const int32_t token = entries[i].token;
    const Choice choice{entries[i].logprob, entries[i].rank};
    const bool is_finite = (entries[i].flags & wire::kResultFlagNotFinite) == 0;
    if (row.value >= seats.size() || !record.owed.cross_off(row)) {
      fault("a token for row ", row.value, ", which samples none, or no other, in step ", session_->retired.value);
    }
    // What nearly all are: a token that is nothing but the next one of its sequence.
    const Rows::Seat& seat = seats[row.value];
    if (seat.owner != nullptr && seat.num_candidates == 0 && is_finite && token >= 0) {
      take_token(*seat.owner, token, choice, now);
      continue;
    }
    const uint32_t returned = is_finite ? seat.num_candidates : 0;
    if (returned > candidates.size()) {
      fault("row ", row.value, " returns ", candidates.size(), " candidates of ", returned);
    }
    const auto own = candidates.first(returned);
    candidates = candidates.subspan(returned);
    if (seat.owner == nullptr) continue;  // it ended while this token was in flight
    if (!is_finite) {
      take_failure(*seat.owner);
    } else if (token < 0) {
      fault("token ", token, " for row ", row.value);
    } else {
      take_candidates(*seat.owner, own, now);
    }
  }
}

void Scheduler::prefetch_owner(const Rows::Seat& seat) {
  if (seat.owner == nullptr) return;
  seat.owner->prefetch_progress();
  seat.owner->prefetch_news();
}

// Every row has given its token. From the second substep on, one whose sequence has ended need not: by a stop token or
// by length it has ended in the data plane too, and only what ended otherwise, say by a cancel, is still computed.
void Scheduler::check_owed(const StepRecord& record) {
  record.owed.for_each([&](RowId row) {
    if (record.num_results != 0 && session_->rows.owner(row) == nullptr) return;
    fault("step ", session_->retired.value, " goes on or ends without a token for row ", row.value);
  });
}

// The data plane has begun the next substep: each sequence that goes on is scheduled as if by a step of its own.
void Scheduler::go_on(StepRecord& record) {
  if (record.num_results == record.num_substeps) {
    fault("step ", session_->retired.value, " has ", record.num_substeps,
          " substeps, and its last result is not marked as such");
  }
  record.load = {};
  record.owed.clear();
  for (const RowId row : record.rows) {
    record.owed.add(row);
    Sequence* const sequence = session_->rows.owner(row);
    if (sequence == nullptr) continue;
    record.load.add_decode(sequence->num_computed.value + 1);
    ++sequence->num_computed;
    ++sequence->num_pending;
    sequence->failed_steps = 0;
  }
}

// What the step took, from when the data plane turned to it: it may have lain in the ring behind the one before. The
// planes share CLOCK_MONOTONIC; what a peer's broken clock says is not learned from.
void Scheduler::learn(const StepRecord& record, const wire::ResultHeader& header, Nanos now) {
  const uint64_t begun_ns = std::max(header.received_ns, session_->finished.value);
  session_->finished = std::max(session_->finished, std::min<Nanos>({header.finished_ns}, now));
  if (begun_ns == 0 || header.finished_ns <= begun_ns || header.finished_ns > now.value || record.rows.empty()) return;
  const double measured_us = static_cast<double>(header.finished_ns - begun_ns) / 1e3;
  counters_.step_us = static_cast<uint64_t>(measured_us);
  counters_.predicted_us = static_cast<uint64_t>(session_->costs.predict_us(record.load));
  if (record.load.decodes != 0) {
    ++counters_.steps_with_decodes;
    counters_.steps_over_target += config_.itl_target_us != 0 && measured_us > config_.itl_target_us;
  }
  session_->costs.observe(record.load, measured_us);
  counters_.step_margin = session_->costs.margin();
}

// Its logits were not finite.
void Scheduler::take_failure(Sequence& sequence) {
  sequence.failed_steps = 0;
  --sequence.num_pending;
  end(sequence, FinishReason::kNotFinite);
}

void Scheduler::take_token(Sequence& sequence, int32_t token, Choice choice, Nanos now) {
  if (sequence.failed_steps != 0) sequence.failed_steps = 0;  // it hardly ever is
  const FinishReason finish = sequence.append(token, choice);
  if (sequence.emitted() == TokenCount{1}) sequence.first_token = now;
  sequence.last_token = now;
  sequence.is_protected = false;
  ++counters_.tokens_emitted;
  if (shares_) shares_->charge_output(sequence.tenant);
  if (finish == FinishReason::kNone) {
    events_.announce(sequence);
  } else {
    end(sequence, finish);
  }
}

// A beam's next token is chosen when those of all beams have come.
void Scheduler::take_candidates(Sequence& sequence, std::span<const wire::Candidate> candidates, Nanos now) {
  assert(is_beam(sequence));
  sequence.failed_steps = 0;
  --sequence.num_pending;
  sequence.is_protected = false;
  if (sequence.state != SequenceState::kRunning) return;  // preempted meanwhile: it will be computed again
  Group& group = *sequence.group;
  BeamSearch& beams = *group.beams;
  for (const wire::Candidate& candidate : candidates) {
    if (candidate.token >= 0 && !std::isnan(candidate.logprob)) continue;  // selecting needs an order
    fault("candidate ", candidate.token, " with log-probability ", candidate.logprob, " for row ", sequence.row.value);
  }
  if (shares_) shares_->charge_output(sequence.tenant);  // computed like any token, whether or not it is in a result
  beams.give(sequence.index, candidates);
  if (!beams.is_complete()) return;
  group.for_each([now](Sequence& member) {
    if (member.first_token == Nanos{0}) member.first_token = now;
    member.last_token = now;
  });
  if (!beams.select(group.members)) deliver_beams(group);
}

// The search is over: each sequence of the group hands over one result, best first.
void Scheduler::deliver_beams(Group& group) {
  for (uint32_t i = 0; i < group.beams->width(); ++i) {
    Sequence& sequence = *group.members[i];
    const BeamSearch::Finished result = group.beams->finished(i);
    sequence.num_computed = std::min(sequence.num_computed, sequence.prompt_tokens);  // the rest is another beam's
    std::ranges::copy(result.tokens, sequence.tokens + sequence.prompt_tokens.value);
    sequence.num_tokens = sequence.prompt_tokens + TokenCount{result.length};
    sequence.score = result.score;
    counters_.tokens_emitted += result.length;
    if (!result.is_by_length) sequence.match = result.tokens.back();
    end_one(sequence, result.is_by_length ? FinishReason::kLength : sequence.stop_reason(result.tokens.back()));
  }
}

void Scheduler::complete_step(StepRecord& record, const wire::ResultHeader& header, Nanos now) {
  record.owed.clear();
  for (size_t i = record.num_decodes; i < record.rows.size(); ++i) {  // the others brought tokens
    if (Sequence* const sequence = session_->rows.owner(record.rows[i])) sequence->failed_steps = 0;
  }
  ++session_->retired;
  ++counters_.steps_retired;
  counters_.last_step_ns = now.value;
  session_->blocks.retire(session_->retired);
  session_->host.retire(session_->retired);
  session_->rows.retire(session_->retired);
  if (record.num_substeps > 1) give_back_ahead(record);
  const bool is_quiet = population_.waiting.empty() && record.load.chunks == 0 && !record.rows.empty();
  session_->quiet_substeps = is_quiet ? std::min(2 * session_->quiet_substeps, config_.max_substeps) : 1;
  // The two planes share CLOCK_MONOTONIC. A clock that says otherwise only spoils a statistic, so the later one counts.
  if (session_->in_flight() == StepSeq{0} && has_work()) {
    session_->idle_since = std::min<Nanos>({header.finished_ns}, now);
  }
}

// A step that was cut short leaves blocks that nothing was written to. Nobody shall yield for lack of them.
void Scheduler::give_back_ahead(const StepRecord& record) {
  for (const RowId row : record.rows) {
    Sequence* const sequence = session_->rows.owner(row);
    if (sequence == nullptr || sequence->state != SequenceState::kRunning) continue;
    session_->blocks.shrink(*sequence, blocks_for(sequence->known(), session_->pool.block_size), session_->sent);
  }
}

}  // namespace twinplane::core
