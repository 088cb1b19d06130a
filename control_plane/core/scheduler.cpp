#include "control_plane/core/scheduler.hpp"

#include <cassert>
#include <memory>
#include <utility>

namespace twinplane::core {
namespace {

const Config& validated(const Config& config) {
  config.validate();
  return config;
}

// Failed steps in a row after which a request is taken to be their cause.
constexpr uint8_t kFailuresToQuarantine = 2;

}  // namespace

Scheduler::Scheduler(const Config& config, Gate& gate, EventQueue& events)
    : config_(validated(config)), gate_(gate), events_(events), population_(config), planner_(config.max_rows) {
  if (config_.policy == Policy::kFair) shares_.emplace(config_);
}

// --- sessions --------------------------------------------------------------------------------------------------------

void Scheduler::attach(const Pool& pool, const wire::Capacities& capacities) {
  if (session_) throw std::logic_error("a session is attached already: detach it first");
  check_capacities(config_, pool, capacities);
  session_.emplace(config_, pool, capacities);
  if (pool.swap_block_ns != 0) expect_swaps({pool.swap_block_ns});
  gate_.set_pool(pool, {capacities.max_extra_words});
  Line& waiting = population_.waiting;
  for (size_t i = 0; i < waiting.size();) {
    Sequence& sequence = waiting[i];
    if (fits(sequence)) {
      sequence.fit_blocks(pool.block_size);
      ++i;
    } else {
      end(sequence, FinishReason::kNeverFits);
    }
  }
}

void Scheduler::detach(SessionEnd how) {
  if (!session_) return;
  if (how == SessionEnd::kStepFailed) quarantine();
  Line& running = population_.running;
  while (!running.empty()) {
    Sequence& sequence = running[running.size() - 1];
    running.erase(sequence);
    sequence.num_blocks = sequence.tree_blocks = sequence.missing_blocks = {0};
    sequence.node = sequence.copy_node = kRootNode;
    sequence.has_copy_source = false;
    if (sequence.is_following) stop_following(sequence);
    put_back(sequence);
  }
  // Tokens in flight were never seen by anyone: they are sampled again, to the same values (INV-10).
  for (size_t i = 0; i < population_.waiting.size(); ++i) {
    Sequence& sequence = population_.waiting[i];
    sequence.num_pending = {0};
    sequence.row = kNoRow;
    sequence.num_saved = {0};
    sequence.saved_tokens = {0};
  }
  session_.reset();
}

void Scheduler::quarantine() {
  if (session_->in_flight() == StepSeq{0}) return;
  for (const RowId row : session_->record(session_->retired).rows) {
    Sequence* const sequence = session_->rows.owner(row);
    if (sequence != nullptr && ++sequence->failed_steps == kFailuresToQuarantine) {
      end(*sequence, FinishReason::kQuarantined);
    }
  }
}

// --- requests --------------------------------------------------------------------------------------------------------

void Scheduler::accept(std::unique_ptr<Sequence> owned) {
  interrupt();
  if (session_) session_->quiet_substeps = 1;
  Sequence& sequence = enroll(std::move(owned));
  if (sequence.has_group) {
    for (auto& member : sequence.group->newcomers) enroll(std::move(member));
  }
  if (!session_) return;  // judged when the next one attaches
  // The gate judged by the pool it knew; a session may have begun since.
  const bool fits_now = fits(sequence);
  for_group(sequence, [&](Sequence& member) {
    if (fits_now) {
      member.fit_blocks(session_->pool.block_size);
    } else {
      end_one(member, FinishReason::kNeverFits);
    }
  });
}

// A newcomer takes its place in the queue; those of a group one behind the other.
Sequence& Scheduler::enroll(std::unique_ptr<Sequence> owned) {
  population_.sequences.prefetch(owned->id);
  owned->arrival = next_arrival_++;
  line_up(*owned);
  population_.deadlines.insert(*owned);
  return population_.sequences.insert(std::move(owned));
}

// A newcomer takes its place in the queue.
void Scheduler::line_up(Sequence& newcomer) {
  if (config_.policy != Policy::kFcfs) newcomer.order = newcomer.priority_order();
  if (shares_) {
    newcomer.tenant = shares_->enter(newcomer.params.tenant);
    newcomer.order += Sequence::first_order_of(newcomer.tenant);
    shares_->wait(newcomer.tenant);
  }
  population_.waiting.insert(newcomer);
}

// It has left the queue, and will never wait for a turn again: from here on arrival decides.
void Scheduler::settle(Sequence& newcomer) {
  if (!shares_) return;
  shares_->unwait(newcomer.tenant);
  newcomer.order = 0;
}

bool Scheduler::cancel(RequestId id) {
  Sequence* const sequence = population_.sequences.find(id);
  if (sequence == nullptr) return false;
  interrupt();
  end(*sequence, FinishReason::kCancelled);
  return true;
}

void Scheduler::stop() {
  interrupt();
  while (!population_.running.empty()) end(population_.running[0], FinishReason::kStopped);
  while (!population_.waiting.empty()) end(population_.waiting[0], FinishReason::kStopped);
}

bool Scheduler::fits(const Sequence& sequence) const {
  return !never_fits(sequence.prompt_tokens, sequence.params, session_->pool, {session_->capacities.max_extra_words});
}

void Scheduler::expire(Nanos now) {
  while (Sequence* const sequence = population_.deadlines.expired(now)) {
    interrupt();
    end(*sequence, FinishReason::kDeadline);
  }
}

// Something came up that the step of several substeps in flight, if there is one, was not planned for.
void Scheduler::interrupt() {
  if (!session_ || !session_->is_alone() || session_->interrupted == session_->sent) return;
  session_->interrupted = session_->sent;
  ++counters_.steps_interrupted;
}

// --- the one way out -------------------------------------------------------------------------------------------------

// Samples end one by one; a beam search ends as a whole, and without results unless it ended by itself.
void Scheduler::end(Sequence& sequence, FinishReason reason) {
  if (!is_beam(sequence)) return end_one(sequence, reason);
  for_group(sequence, [&](Sequence& member) {
    member.num_tokens = member.prompt_tokens;
    end_one(member, reason);
  });
}

// Every end, in whatever state, for whatever reason. Steps in flight may still name its row and blocks; those retire
// behind the fence, and the late token finds no owner. Nothing names the sequence itself any more.
void Scheduler::end_one(Sequence& sequence, FinishReason reason) {
  population_.sequences.prefetch(sequence.id);
  if (sequence.has_group) leave_group(sequence);
  if (sequence.state == SequenceState::kRunning) {
    population_.running.erase(sequence);
    leave_device(sequence, reason != FinishReason::kNotFinite);
  } else {
    population_.waiting.erase(sequence);
    gate_.leave_queue(sequence);
    if (sequence.is_swapped()) forget_saved(sequence);
    if (!sequence.was_resident) settle(sequence);
  }
  if (shares_) shares_->leave(sequence.tenant);
  if (session_) session_->rows.disown(sequence);
  population_.deadlines.erase(sequence);
  sequence.become(SequenceState::kFinished);
  sequence.finish = reason;
  ++counters_.finished[static_cast<size_t>(reason)];
  events_.announce_end(population_.sequences.take(sequence.id));
}

// If others follow it, whose prompt it computes, they begin again; what it has computed they find in the prefix tree.
void Scheduler::leave_group(Sequence& sequence) {
  Group& group = *sequence.group;
  if (group.first() == &sequence && sequence.is_swapped()) {
    group.for_each([this](Sequence& member) { forget_saved(member); });  // the shared blocks go with it
  }
  group.members[sequence.index] = nullptr;
  if (sequence.is_following || group.num_following == 0 || sequence.state != SequenceState::kRunning) return;
  group.for_each([this](Sequence& member) {
    if (!member.is_following) return;
    population_.running.erase(member);
    leave_device(member, false);
    put_back(member);
  });
}

// Gives up row and blocks, behind the fence of the steps in flight (INV-3).
void Scheduler::leave_device(Sequence& sequence, bool keep_blocks) {
  const StepSeq fence = session_->sent;
  if (sequence.is_following) stop_following(sequence);
  session_->blocks.release(sequence, fence, keep_blocks);
  session_->rows.vacate(sequence, fence);
  session_->rows.retire(session_->retired);  // with nothing in flight the row is free at once, as the blocks are
}

// What it saved is not needed any more.
void Scheduler::forget_saved(Sequence& sequence) {
  for (uint32_t i = 0; i < sequence.num_saved.value; ++i) session_->host.release(sequence.saved[i], session_->sent);
  sequence.num_saved = {0};
  sequence.saved_tokens = {0};
}

void Scheduler::stop_following(Sequence& sequence) {
  sequence.is_following = false;
  --sequence.group->num_following;
}

// From the device to its place in the queue. Tokens in flight still count as pending.
void Scheduler::put_back(Sequence& sequence) {
  sequence.become(SequenceState::kWaiting);
  sequence.num_computed = {0};
  if (is_beam(sequence)) {  // all of them compute, and sample, again
    sequence.group->beams->forget_given();
    sequence.group->beams->forget_moves();
  }
  population_.waiting.insert(sequence);
  gate_.put_back(sequence);
}

// --- steps -----------------------------------------------------------------------------------------------------------

bool Scheduler::can_send() const {
  return session_ && !session_->has_failed && session_->in_flight() < StepSeq{config_.depth} && !session_->is_alone();
}

bool Scheduler::tick(std::byte* slot, Nanos now) {
  ++counters_.ticks;
  expire(now);
  if (!can_send()) return false;
  const State state{.config = config_,
                    .session = *session_,
                    .waiting = population_.waiting,
                    .running = population_.running,
                    .now = now,
                    .shares = shares_ ? &*shares_ : nullptr,
                    .next_deadline = population_.deadlines.next()};
  StepWriter step(slot, session_->capacities);
  StepRecord& record = session_->record(session_->sent);
  record.rows.clear();
  bool has_yielded;
  do {
    const StepPlan& plan = planner_.plan(state);
    if (plan.num_substeps > 1 && session_->in_flight() != StepSeq{0}) return false;  // it will be alone (INV-12)
    has_yielded = !plan.yielding.empty();
    carry_out(plan, record, step);
    // The plan counts of those who yield only what is surely theirs alone. If that was too little for anyone to go on,
    // there is more now.
  } while (has_yielded && step.is_empty() && session_->in_flight() == StepSeq{0});
  while (const auto admission = planner_.next_admission(state)) admit(*admission, record, step, now);
  for (const Hopeless& late : planner_.hopeless()) {
    late.sequence->estimate = late.estimate;
    end(*late.sequence, FinishReason::kUnreachable);
  }
  // Rows to close ride on the next step that has work. If none is in sight, they get one of their own.
  if (step.is_empty() && (session_->in_flight() != StepSeq{0} || session_->rows.closing().empty())) return false;
  send(step, now);
  return true;
}

}  // namespace twinplane::core
