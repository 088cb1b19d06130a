// A serving system, as far as memory and batches go: the real scheduler, or one of those it is compared to.
#pragma once

#include <optional>

#include "control_plane/simulator/csrc/device.hpp"
#include "control_plane/simulator/csrc/recorder.hpp"

namespace twinplane::simulator {

// When the device began and ended a step.
struct Ran {
  Nanos began;
  Nanos ended;
};

// Requests are known by their index in the trace. A system tells the recorder when a request is scheduled for the first
// time, gets tokens, ends, or is refused.
class System {
 public:
  virtual ~System() = default;

  virtual void submit(size_t request, Nanos now) = 0;

  // The next step, or substep of the one the device goes on with by itself, if there is one that can begin now.
  virtual std::optional<Work> next_step(Nanos now) = 0;

  // The oldest step in flight is done, and the host turns to it now.
  virtual void complete(const Ran& step, Nanos now) = 0;

  virtual Memory memory() const = 0;
};

}  // namespace twinplane::simulator
