// The virtual clock: one host that plans, one device that runs steps in order.
#pragma once

#include <functional>

#include "control_plane/simulator/csrc/device.hpp"
#include "control_plane/simulator/csrc/recorder.hpp"
#include "control_plane/simulator/csrc/system.hpp"
#include "control_plane/simulator/csrc/trace.hpp"

namespace twinplane::simulator {

struct ClockOptions {
  Curve host_ns;  // of planning a step and digesting its results, by sequences in it
  Nanos stop_at;  // end there, whatever is unfinished; 0 = when everything is done
};

struct Totals {
  uint64_t steps = 0;           // that run the model
  uint64_t sequence_steps = 0;  // sequences, summed over the steps
  uint64_t tokens = 0;          // through the model, summed over the steps
  Nanos device_busy;
  Nanos end;
};

// Called now and then with the requests done and the virtual time; may throw to end the simulation.
using Progress = std::function<void(size_t done, Nanos now)>;

// Replays `trace`. Throws std::logic_error if the system stalls with requests left.
Totals run(const Trace& trace, System& system, const Device& device, const ClockOptions& options, Recorder& recorder,
           const Progress& progress);

}  // namespace twinplane::simulator
