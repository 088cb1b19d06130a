// The core's values as Python objects, for module.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

#include "control_plane/core/engine_core.hpp"
#include "control_plane/core/gate.hpp"
#include "control_plane/core/scheduler.hpp"
#include "control_plane/core/stats.hpp"

namespace twinplane::core {

// Creates the named tuples Event, Refusal and Stats in `module`.
void add_named_tuples(nanobind::module_& module);

// `sequence` as EventQueue::poll shows it: output tokens [from, to) are new.
nanobind::object to_event(const Sequence& sequence, uint32_t from, uint32_t to, bool is_last);
nanobind::object to_refusal(const std::optional<Refusal>& refusal);  // None if there is none
nanobind::object to_stats(const Stats& stats, uint64_t refused);
nanobind::dict to_dict(const std::optional<PeerView>& peer);
nanobind::dict snapshot(const Scheduler& scheduler);

}  // namespace twinplane::core
