// Memory: who may be on the device, and who yields. Counts as the free counts will be while the plan is carried out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "control_plane/core/plan.hpp"
#include "control_plane/core/state.hpp"

namespace twinplane::core {

class Residency {
 public:
  // Victims go into the plan.
  Residency(const State& state, StepPlan& plan);

  // The running sequence at `index` of the line enters a new block: true if one is set aside for it. Otherwise it is
  // not in this step, because it waits for blocks that come free or because it yields itself. Asked in serving order.
  bool grow(size_t index);

  // A resident sequence is short of memory: nobody else comes in.
  bool is_short() const { return is_short_; }

 private:
  bool yield_one_behind(size_t index);
  void yield(size_t index);
  void yield_one(size_t index);
  bool is_protected(size_t index) const;
  bool is_same_group(size_t a, size_t b) const;

  const State& state_;
  StepPlan& plan_;
  BlockCount free_;       // usable in this step
  BlockCount soon_free_;  // fenced: usable when the steps in flight have retired
  BlockCount claimed_;    // of these, how many somebody waits for
  size_t unasked_;        // running sequences from here on have been looked at as victims
  bool is_short_ = false;
};

// There are rows and blocks, of which the match brings some, for one more. A partial match that
// would take what is needed elsewhere is given up.
bool has_room(const State& state, const Need& need, Match& match);

}  // namespace twinplane::core
