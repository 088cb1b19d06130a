// How many tokens the data plane may make of one step before it hears from the scheduler again.
#pragma once

#include <cstdint>

#include "control_plane/core/plan.hpp"

namespace twinplane::core {

// 1 unless each running sequence has a plain decode in `plan` and nobody waits; then as many as config, quiet,
// deadlines and free blocks allow. `load`: the plan's. It never makes anybody yield, and never takes much of the prefix
// cache.
uint32_t choose_substeps(const State& state, const StepPlan& plan, const StepLoad& load);

}  // namespace twinplane::core
