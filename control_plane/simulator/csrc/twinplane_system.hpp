// The production scheduler: the same object a server runs, fed from a trace instead of from clients and a data plane.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "control_plane/core/scheduler.hpp"
#include "control_plane/simulator/csrc/system.hpp"
#include "control_plane/simulator/csrc/trace.hpp"

namespace twinplane::simulator {

class TwinplaneSystem final : public System {
 public:
  // Throws std::invalid_argument for a config or pool that makes no sense. Every `check_interval` steps (0 = never) the
  // scheduler's state is checked (INV-5 and every other redundancy); a difference ends the simulation.
  TwinplaneSystem(const Trace& trace, const core::Config& config, const core::Pool& pool, uint32_t check_interval,
                  Recorder& recorder);

  void submit(size_t request, Nanos now) override;
  std::optional<Work> next_step(Nanos now) override;
  void complete(const Ran& step, Nanos now) override;
  Memory memory() const override;

  const core::Scheduler& scheduler() const { return scheduler_; }

 private:
  // A token that a step in flight will sample.
  struct Sample {
    uint32_t row;
    int32_t token;
    uint32_t position;
  };

  std::vector<Sample> no_samples();
  void add_sample(std::vector<Sample>& samples, uint32_t row, uint32_t context) const;
  Work go_on();
  bool has_ended(const Sample& sample) const;
  int32_t sampled(uint32_t row, uint32_t context) const;
  void write_result(const std::vector<Sample>& samples, const Ran& step, bool is_last);
  void take_events(Nanos now);

  const Trace& trace_;
  Recorder& recorder_;
  const core::Config config_;
  const core::Pool pool_;
  const uint32_t check_interval_;
  const wire::Capacities capacities_;
  const wire::StepSlotLayout step_layout_;
  const wire::ResultSlotLayout result_layout_;
  core::Gate gate_;
  core::Scheduler scheduler_;
  core::EventQueue events_;
  std::vector<std::byte> step_;
  std::vector<std::byte> result_;
  std::vector<int32_t> prompt_;              // scratch
  std::vector<uint64_t> sequences_;          // by row, as the data plane knows it: whose tokens it samples
  std::vector<uint32_t> limits_;             // by row, as the data plane knows it: tokens its sequence may have
  std::vector<uint32_t> unfinished_;         // by request: samples that go on
  std::deque<std::vector<Sample>> samples_;  // of the steps in flight
  uint32_t num_substeps_ = 1;                // of the step sent last; above 1, it is alone in flight
  uint32_t substep_ = 0;                     // of the oldest step in flight
  std::vector<Sample> going_on_;             // last tokens of its rows that have not ended: they begin the next substep
  std::vector<std::vector<Sample>> spare_;
  uint64_t retired_ = 0;
};

}  // namespace twinplane::simulator
