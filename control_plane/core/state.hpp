// Everything a pass reads: who waits, who runs, what is free, what is in flight.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <vector>

#include "control_plane/core/bit_set.hpp"
#include "control_plane/core/block_manager.hpp"
#include "control_plane/core/config.hpp"
#include "control_plane/core/cost_model.hpp"
#include "control_plane/core/deadlines.hpp"
#include "control_plane/core/fair_share.hpp"
#include "control_plane/core/host_pool.hpp"
#include "control_plane/core/line.hpp"
#include "control_plane/core/rows.hpp"
#include "control_plane/core/sequence_table.hpp"
#include "control_plane/core/types.hpp"

namespace twinplane::core {

// Rows that owe a token. A word for each and not a bit, because every token is crossed off here.
class OwedTokens {
 public:
  explicit OwedTokens(uint32_t max_rows) : owes_(max_rows) {}

  // It must owe none.
  void add(RowId row) {
    assert(owes_[row.value] == 0);
    owes_[row.value] = 1;
    ++count_;
  }
  // The row's token has come; false if it owes none.
  bool cross_off(RowId row) {
    if (owes_[row.value] == 0) return false;
    owes_[row.value] = 0;
    --count_;
    return true;
  }
  void clear() {
    if (count_ == 0) return;
    std::fill(owes_.begin(), owes_.end(), 0);
    count_ = 0;
  }

  // visit(row) for each that owes one.
  template <typename Visit>
  void for_each(Visit visit) const {
    if (count_ == 0) return;
    for (uint32_t row = 0; row < owes_.size(); ++row) {
      if (owes_[row] != 0) visit(RowId{row});
    }
  }

 private:
  std::vector<uint32_t> owes_;
  uint32_t count_ = 0;
};

// What a step in flight did, to check and route its results.
struct StepRecord {
  explicit StepRecord(uint32_t max_rows) : owed(max_rows) { rows.reserve(max_rows); }

  std::vector<RowId> rows;  // every scheduled row, decodes first
  size_t num_decodes = 0;   // of these; each brings a token
  OwedTokens owed;          // of the substep under way
  StepLoad load;            // of the substep under way
  uint32_t num_substeps = 1;
  uint32_t num_results = 0;  // that came; the step retires with its last one
};

// Pins a row can let go of between two steps: its sequence's when it leaves, twice if its blocks turn out to be the
// tree's already, then the sources of two copies of the next one.
inline constexpr size_t kPinsPerRow = 4;

// One attachment of one data plane. Step numbers begin at 0 in each.
struct Session {
  Session(const Config& config, const Pool& p, const wire::Capacities& c)
      : pool(p),
        capacities(c),
        blocks(p.num_blocks, p.block_size, size_t{config.max_rows} * kPinsPerRow * (config.depth + 2)),
        host(p.num_host_blocks),
        rows(config.max_rows),
        records(config.depth, StepRecord(config.max_rows)) {}

  StepSeq in_flight() const { return sent - retired; }
  StepRecord& record(StepSeq step) { return records[step.value % records.size()]; }
  const StepRecord& record(StepSeq step) const { return records[step.value % records.size()]; }

  // A step of several substeps is in flight. Where it ends is not known, so no step is sent behind it (INV-12).
  bool is_alone() const { return in_flight() != StepSeq{0} && record(sent - StepSeq{1}).num_substeps > 1; }

  Pool pool;
  wire::Capacities capacities;
  BlockManager blocks;
  HostPool host;
  Rows rows;
  StepSeq sent;                     // steps written; the next one's number
  StepSeq retired;                  // steps whose last result came
  std::vector<StepRecord> records;  // of the steps in flight
  CostModel costs;                  // of this data plane's steps
  double kept_share = 0;        // of what the preempted had computed, what was still cached when they came back, lately
  Nanos finished;               // when the data plane was done with the last step that retired
  Nanos idle_since;             // the data plane has been idle since then although there is work; 0 = it is not
  uint32_t quiet_substeps = 1;  // as many as a step may have: doubles with each step of decodes while nobody comes
  StepSeq interrupted;          // steps below this number are to end after the substep under way
  bool has_failed = false;      // a step failed or the peer broke the protocol: nothing more is sent
};

// Who is in the core. Survives sessions.
struct Population {
  explicit Population(const Config& config)
      : sequences(config.max_live()),
        deadlines(config.max_live()),
        waiting(config.max_live()),
        running(config.max_rows) {}

  SequenceTable sequences;  // all live ones, owned
  Deadlines deadlines;
  Line waiting;
  Line running;
};

// The planner's view.
struct State {
  const Config& config;
  const Session& session;
  const Line& waiting;
  const Line& running;
  Nanos now;
  const FairShare* shares;  // null: the policy is another
  Nanos next_deadline;      // of all live sequences; 0 = none has one
};

}  // namespace twinplane::core
