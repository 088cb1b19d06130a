#include "control_plane/simulator/csrc/clock.hpp"

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string>

namespace twinplane::simulator {
namespace {

constexpr uint64_t kStepsBetweenProgress = 4096;

class Clock {
 public:
  Clock(const Trace& trace, System& system, const Device& device, const ClockOptions& options, Recorder& recorder,
        const Progress& progress)
      : trace_(trace), system_(system), device_(device), options_(options), recorder_(recorder), progress_(progress) {}

  //   host    |plan s|...|plan s+1|......... the host is busy while it plans,
  //   device         |== step s ==|== step s+1 ==|  a step begins when it was sent and the one before it is done
  Totals run() {
    while (!has_stopped()) {
      while (arrived_ < trace_.size() && trace_[arrived_].arrival <= now_) system_.submit(arrived_++, now_);
      while (!in_flight_.empty() && in_flight_.front().ended <= now_) {
        const Ran step = in_flight_.front();
        in_flight_.pop_front();
        system_.complete(step, now_);
        if (in_flight_.empty()) recorder_.memory(system_.memory(), now_);
      }
      if (const std::optional<Work> work = system_.next_step(now_)) {
        send(*work);
      } else if (!wait()) {
        break;
      }
    }
    recorder_.settle(now_);
    totals_.end = now_;
    return totals_;
  }

 private:
  bool has_stopped() const { return options_.stop_at != Nanos{0} && now_ >= options_.stop_at; }

  void send(const Work& work) {
    recorder_.memory(system_.memory(), now_);
    if (!work.is_substep) now_ += {static_cast<uint64_t>(options_.host_ns(work.sequences))};
    const Nanos took = device_.time(work);
    const Nanos began = std::max(device_free_, now_);
    device_free_ = began + took;
    in_flight_.push_back({began, device_free_});
    totals_.device_busy += took;
    totals_.sequence_steps += work.sequences;
    totals_.tokens += work.tokens;
    if (work.tokens == 0) return;  // only tells the device that rows have closed
    if (++totals_.steps % kStepsBetweenProgress == 0 && progress_) progress_(recorder_.num_closed(), now_);
  }

  // To the next thing that happens; false if nothing will.
  bool wait() {
    const Nanos arrival = arrived_ < trace_.size() ? trace_[arrived_].arrival : kNever;
    const Nanos done = in_flight_.empty() ? kNever : in_flight_.front().ended;
    const Nanos next = std::min(arrival, done);
    if (next == kNever) {
      if (recorder_.num_closed() == trace_.size()) return false;
      throw std::logic_error("the simulated system stalls with " +
                             std::to_string(trace_.size() - recorder_.num_closed()) + " requests unfinished");
    }
    now_ = next;
    return true;
  }

  const Trace& trace_;
  System& system_;
  const Device& device_;
  const ClockOptions& options_;
  Recorder& recorder_;
  const Progress& progress_;
  std::deque<Ran> in_flight_;  // what each step in flight will have been
  size_t arrived_ = 0;
  Nanos now_;
  Nanos device_free_;
  Totals totals_;
};

}  // namespace

Totals run(const Trace& trace, System& system, const Device& device, const ClockOptions& options, Recorder& recorder,
           const Progress& progress) {
  return Clock(trace, system, device, options, recorder, progress).run();
}

}  // namespace twinplane::simulator
