// The scheduler: requests in, steps down, results up, events out. No thread, no clock, no ring: EngineCore gives it
// those, and so do tests and the simulator. Contract: control_plane/CONTRACT.md. Not thread-safe; one thread at a time
// is "the core".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "control_plane/core/event_queue.hpp"
#include "control_plane/core/gate.hpp"
#include "control_plane/core/group.hpp"
#include "control_plane/core/plan.hpp"
#include "control_plane/core/state.hpp"
#include "control_plane/core/step_writer.hpp"

namespace twinplane::core {

// The data plane sent what PROTOCOL.md forbids. Nothing is sent any more until the session is replaced.
struct ProtocolFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// How a session ended.
enum class SessionEnd { kLost, kStepFailed };

// Totals since the core was made.
struct Counters {
  uint64_t steps_sent = 0;
  uint64_t steps_retired = 0;
  uint64_t results_taken = 0;      // more than steps_retired where steps had several substeps
  uint64_t steps_interrupted = 0;  // of several substeps, asked to end early
  uint64_t tokens_emitted = 0;
  uint64_t prompt_tokens_computed = 0;  // of chunks: prefill and recomputation
  uint64_t cached_tokens = 0;           // found in the prefix cache instead
  uint64_t preemptions = 0;
  uint64_t blocks_swapped_out = 0;
  uint64_t blocks_swapped_in = 0;
  std::array<uint64_t, kNumFinishReasons> finished{};
  uint64_t ticks = 0;
  uint64_t apply_us = 0;      // what results say the data plane took: for deltas and batch,
  uint64_t forward_us = 0;    // for the model,
  uint64_t sample_us = 0;     // for sampling
  uint64_t host_gap_ns = 0;   // the data plane had nothing to do although work was runnable
  uint64_t last_step_ns = 0;  // when the last step retired
  uint64_t step_us = 0;       // what the last step took
  uint64_t predicted_us = 0;  // what it was expected to take
  double step_margin = 0;     // 99 % of the steps with prompt chunks take at most so many times the expected time
  uint64_t steps_with_decodes = 0;
  uint64_t steps_over_target = 0;  // of these, slower than the latency target
  uint64_t chunk_allowance = 0;    // prompt tokens the last step with some might have carried
};

class Scheduler {
 public:
  // Throws std::invalid_argument for a config that makes no sense. `gate` and `events` outlive the scheduler.
  Scheduler(const Config& config, Gate& gate, EventQueue& events);

  // --- sessions (may allocate) -------------------------------------------------------------------------------------

  // A data plane offers its pool. Waiting requests that can never fit into it end. Throws std::invalid_argument if the
  // capacities are too small, std::logic_error if a session is attached.
  void attach(const Pool& pool, const wire::Capacities& capacities);

  // The data plane is gone, with all it held. What ran goes back to its place in the queue, to be computed again;
  // steps in flight are forgotten. After kStepFailed, whoever was in the oldest of them for the second time running
  // ends. Without a session, nothing.
  void detach(SessionEnd end);

  // The session's data plane has measured what moving one block to the host's pool and back takes. Before the first
  // step.
  void expect_swaps(Nanos per_block) { session_->costs.expect_swap_us(static_cast<double>(per_block.value) / 2e3); }

  bool is_attached() const { return session_.has_value(); }

  // --- requests ----------------------------------------------------------------------------------------------------

  // A sequence the gate let in.
  void accept(std::unique_ptr<Sequence> sequence);

  // True if there was such a request.
  bool cancel(RequestId id);

  // Nothing cached so far is found any more.
  void reset_prefix_cache() {
    if (session_) session_->blocks.reset_cache();
  }

  // Every request ends as kStopped.
  void stop();

  // --- steps -------------------------------------------------------------------------------------------------------

  // Less than `depth` steps are in flight and the session is sound.
  bool can_send() const;

  // Plans and commits one step into `slot` (StepSlotLayout of the session's capacities). False if there is nothing to
  // send; the slot is then untouched, but deadlines were honoured and sequences may have been preempted.
  bool tick(std::byte* slot, Nanos now);

  // Steps below this number, of several substeps, are to end after the substep under way: the caller tells the data
  // plane. It only grows within a session.
  StepSeq interrupted() const { return session_ ? session_->interrupted : StepSeq{0}; }

  // Takes one result slot, of the oldest step in flight. Throws ProtocolFault naming what is wrong with it.
  void retire(const std::byte* result, Nanos now);

  // Ends what is past its deadline, before anything is spent on it. tick() does it as well.
  void expire(Nanos now);

  // --- looking -----------------------------------------------------------------------------------------------------

  const Config& config() const { return config_; }
  const Counters& counters() const { return counters_; }
  const Population& population() const { return population_; }
  const std::optional<Session>& session() const { return session_; }
  const std::optional<FairShare>& shares() const { return shares_; }

  // Recomputes INV-5 and every other redundancy of the state from its owners; the first difference, or "". Allocates.
  std::string check() const;

 private:
  // commit.cpp: the second half of a pass, the only code that acts on a plan.
  void preempt(std::span<Sequence* const> victims, StepWriter& step);
  bool is_worth_swapping(std::span<Sequence* const> victims, const StepWriter& step) const;
  BlockCount first_to_save(const Sequence& sequence) const;
  void swap_out(Sequence& sequence, StepWriter& step);
  void swap_in(Sequence& sequence, BlockCount from, StepWriter& step);
  void come_back(const Sequence& first, Sequence& member, StepWriter& step);
  void carry_out(const StepPlan& plan, StepRecord& record, StepWriter& step);
  void admit(const Admission& admission, StepRecord& record, StepWriter& step, Nanos now);
  void note_kept(const Sequence& sequence, const Match& match);
  void count_overtaken(const Sequence& sequence, size_t overtakes);
  void send(StepWriter& step, Nanos now);
  void add_block(Sequence& sequence, StepWriter& step);
  void add_blocks(Sequence& sequence, BlockCount blocks, StepWriter& step);
  void add_blocks_ahead(Sequence& sequence, uint32_t num_substeps, StepWriter& step);
  void admit_follower(Sequence& sequence, StepWriter& step, Nanos now);
  void open_row(Sequence& sequence, StepWriter& step, Nanos now);
  void move_beams(Group& group, StepWriter& step);
  void fork_followers(Sequence& first, StepWriter& step);
  void schedule_plain(std::span<Sequence* const> sequences, StepRecord& record, StepWriter& step);
  void schedule(const Scheduled& scheduled, uint32_t flags, StepRecord& record, StepWriter& step);

  // retire.cpp
  void take_entries(std::span<const wire::ResultEntry> entries, std::span<const wire::Candidate> candidates,
                    StepRecord& record, Nanos now);
  static void prefetch_owner(const Rows::Seat& seat);
  void take_failure(Sequence& sequence);
  void take_token(Sequence& sequence, int32_t token, Choice choice, Nanos now);
  void take_candidates(Sequence& sequence, std::span<const wire::Candidate> candidates, Nanos now);
  void deliver_beams(Group& group);
  void check_owed(const StepRecord& record);
  void go_on(StepRecord& record);
  void complete_step(StepRecord& record, const wire::ResultHeader& header, Nanos now);
  void give_back_ahead(const StepRecord& record);
  void learn(const StepRecord& record, const wire::ResultHeader& header, Nanos now);
  template <typename... Parts>
  [[noreturn]] void fault(const Parts&... parts);

  // scheduler.cpp
  void interrupt();
  void end(Sequence& sequence, FinishReason reason);
  void end_one(Sequence& sequence, FinishReason reason);
  void leave_group(Sequence& sequence);
  void stop_following(Sequence& sequence);
  void forget_saved(Sequence& sequence);
  Sequence& enroll(std::unique_ptr<Sequence> owned);
  static bool is_beam(const Sequence& sequence) { return sequence.has_group && sequence.group->beams != nullptr; }
  // visit(member) for the live sequences of its request, itself among them. They may end meanwhile.
  template <typename Visit>
  void for_group(Sequence& sequence, Visit visit) {
    if (!sequence.has_group) return visit(sequence);
    sequence.group->for_each(visit);  // lives as long as any event of this batch is not handed over
  }
  void leave_device(Sequence& sequence, bool keep_blocks);
  void put_back(Sequence& sequence);
  void line_up(Sequence& newcomer);
  void settle(Sequence& newcomer);
  void quarantine();
  bool fits(const Sequence& sequence) const;
  bool has_work() const { return !population_.running.empty() || !population_.waiting.empty(); }

  const Config config_;
  Gate& gate_;
  EventQueue& events_;
  Population population_;
  std::optional<Session> session_;
  std::optional<FairShare> shares_;  // with policy fair
  Planner planner_;
  Counters counters_;
  uint64_t next_arrival_ = 0;
};

}  // namespace twinplane::core
