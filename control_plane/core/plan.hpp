// A pass's first half: decide everything about the next step, change nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "control_plane/core/cost_model.hpp"
#include "control_plane/core/state.hpp"

namespace twinplane::core {

struct Scheduled {
  Sequence* sequence;
  TokenCount tokens;  // to compute in this step, from num_computed on
};

// What commit is to do, in this order.
struct StepPlan {
  explicit StepPlan(uint32_t max_rows) : yields(max_rows) {
    yielding.reserve(max_rows);
    decodes.reserve(max_rows);
    chunks.reserve(max_rows);
    admissions.reserve(max_rows);
  }

  void clear() {
    yielding.clear();
    yields.clear();
    decodes.clear();
    chunks.clear();
    admissions.clear();
    load = {};
    chunk_allowance = {0};
  }

  bool has_work() const { return !decodes.empty() || !chunks.empty() || !admissions.empty(); }

  std::vector<Sequence*> yielding;    // to be preempted
  BitSet yields;                      // the same, by place in the running line
  std::vector<Scheduled> decodes;     // one token each; a new block if the last one is full
  std::vector<Scheduled> chunks;      // of sequences that are resident
  std::vector<Scheduled> admissions;  // become resident, with their first chunk
  StepLoad load;                      // what all of it adds up to
  TokenCount chunk_allowance;         // prompt tokens the step had room for
};

class Residency;
class Budget;

// Deterministic: the same state gives the same plan. Holds the plan's memory, nothing else.
class Planner {
 public:
  explicit Planner(uint32_t max_rows) : plan_(max_rows) { behind_.reserve(max_rows); }

  // Valid until the next call.
  const StepPlan& plan(const State& state);

 private:
  void deal_to_decodes(const State& state, Residency& residency, Budget& budget);
  void deal_to_chunks(const State& state, Budget& budget);
  void admit(const State& state, Residency& residency, Budget& budget);

  StepPlan plan_;
  // Scratch: the running sequences with more than one token to go, found while dealing to the decodes.
  std::vector<size_t> behind_;
};

}  // namespace twinplane::core
