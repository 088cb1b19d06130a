// Results: tokens to their sequences, and the fences of retired steps opened. What the peer wrote is checked before it
// is used.
#include <algorithm>
#include <cstring>

#include "control_plane/core/scheduler.hpp"

namespace twinplane::core {
namespace {

std::string text(uint64_t value) { return std::to_string(value); }

}  // namespace

void Scheduler::fault(const std::string& message) {
  session_->has_failed = true;
  throw ProtocolFault("the data plane broke the protocol: " + message);
}

void Scheduler::retire(const std::byte* slot, Nanos now) {
  if (!session_) throw std::logic_error("a result without a session");
  if (session_->has_failed) return;
  const wire::ResultSlotLayout layout(session_->capacities);
  wire::ResultHeader header;
  std::memcpy(&header, slot + layout.header, sizeof(header));
  if (session_->in_flight() == StepSeq{0})
    fault("a result of step " + text(header.step) + ", but no step is in flight");
  if (header.step != session_->retired.value) {
    fault("a result of step " + text(header.step) + ", but the oldest in flight is " + text(session_->retired.value));
  }
  if (header.status != wire::kStepStatusOk) {
    session_->has_failed = true;  // the cause comes over the lifeline, and detach() with it
    return;
  }
  if (header.num_entries > session_->capacities.max_results) {
    fault("a result with " + text(header.num_entries) + " entries, its slot holds " +
          text(session_->capacities.max_results));
  }
  StepRecord& record = session_->record(session_->retired);
  for (uint32_t i = 0; i < header.num_entries; ++i) {
    wire::ResultEntry entry;
    std::memcpy(&entry, slot + layout.entries + i * sizeof(entry), sizeof(entry));
    take_entry(entry, record, now);
  }
  if (header.last != 0) complete_step(record, {header.finished_ns}, now);
}

void Scheduler::take_entry(const wire::ResultEntry& entry, StepRecord& record, Nanos now) {
  if (entry.row >= session_->rows.size() || !record.samples.test(entry.row)) {
    fault("a token for row " + text(entry.row) + ", which samples none, or no other, in step " +
          text(session_->retired.value));
  }
  record.samples.reset(entry.row);
  Sequence* const sequence = session_->rows.owner({entry.row});
  if (sequence == nullptr) return;  // it ended while this token was in flight
  if ((entry.flags & wire::kResultFlagNotFinite) != 0) {
    --sequence->num_pending;
    end(*sequence, FinishReason::kNotFinite);
    return;
  }
  if (entry.token < 0) fault("token " + std::to_string(entry.token) + " for row " + text(entry.row));
  const FinishReason finish = sequence->append(entry.token, entry.logprob, entry.rank);
  if (sequence->emitted() == TokenCount{1}) sequence->first_token = now;
  sequence->last_token = now;
  sequence->is_protected = false;
  ++counters_.tokens_emitted;
  if (finish == FinishReason::kNone) {
    events_.announce(*sequence);
  } else {
    end(*sequence, finish);
  }
}

void Scheduler::complete_step(StepRecord& record, Nanos finished, Nanos now) {
  if (!record.samples.empty()) {
    fault("step " + text(session_->retired.value) + " ended without a token for row " + text(record.samples.first()));
  }
  for (const RowId row : record.rows) {
    if (Sequence* const sequence = session_->rows.owner(row)) sequence->failed_steps = 0;
  }
  ++session_->retired;
  ++counters_.steps_retired;
  counters_.last_step_ns = now.value;
  session_->blocks.retire(session_->retired);
  session_->rows.retire(session_->retired);
  // The two planes share CLOCK_MONOTONIC. A clock that says otherwise only spoils a statistic, so the later one counts.
  if (session_->in_flight() == StepSeq{0} && has_work()) session_->idle_since = std::min(finished, now);
}

}  // namespace twinplane::core
