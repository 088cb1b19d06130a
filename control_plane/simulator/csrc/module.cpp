// twinplane.control_plane._simulator: the Python surface of the simulator. See _simulator.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "control_plane/simulator/csrc/clock.hpp"
#include "control_plane/simulator/csrc/contiguous_system.hpp"
#include "control_plane/simulator/csrc/prefill_first_system.hpp"
#include "control_plane/simulator/csrc/static_system.hpp"
#include "control_plane/simulator/csrc/twinplane_system.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace twinplane::simulator {
namespace {

template <typename T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Points = std::vector<std::pair<double, double>>;

Curve to_curve(const Points& points, const std::string& name) {
  std::vector<Curve::Point> converted;
  converted.reserve(points.size());
  for (const auto& [x, y] : points) converted.push_back({x, y});
  return {std::move(converted), name};
}

// A NumPy array that owns its memory.
template <typename T>
nb::object to_array(std::vector<T> values) {
  auto owned = std::make_unique<std::vector<T>>(std::move(values));
  T* const data = owned->data();
  const size_t size = owned->size();
  nb::capsule owner(owned.release(), [](void* at) noexcept { delete static_cast<std::vector<T>*>(at); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {size}, owner));
}

double seconds(Nanos at) {
  return at == kNever ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(at.value) * 1e-9;
}

// One array per field.
template <typename T, typename Record, typename Read>
nb::object column(const std::vector<Record>& records, Read read) {
  std::vector<T> values;
  values.reserve(records.size());
  for (const Record& record : records) values.push_back(static_cast<T>(read(record)));
  return to_array(std::move(values));
}

struct Options {
  ClockOptions clock;
  Nanos sample_interval;
  Nanos measure_from;
};

Options to_options(const Points& host_ns, uint64_t stop_at_ns, uint64_t sample_interval_ns, uint64_t measure_from_ns) {
  return {{to_curve(host_ns, "host_ns"), {stop_at_ns}}, {sample_interval_ns}, {measure_from_ns}};
}

// Calls back at most ten times a second of real time, and lets Ctrl-C through.
class Reporter {
 public:
  explicit Reporter(const nb::object& callback) : callback_(callback) {}

  void operator()(size_t done, Nanos now) {
    const auto real = std::chrono::steady_clock::now();
    if (real - last_ < std::chrono::milliseconds(100)) return;
    last_ = real;
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (!callback_.is_none()) callback_(done, seconds(now));
  }

 private:
  const nb::object& callback_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

nb::dict to_dict(const MemorySums& sums) {
  nb::dict dict;
  const double s = sums.seconds > 0 ? sums.seconds : 1;
  dict["held_tokens"] = sums.held / s;
  dict["reserved_tokens"] = sums.reserved / s;
  dict["overreserved_tokens"] = sums.overreserved / s;
  dict["allocated_tokens"] = sums.allocated / s;
  dict["mapped_tokens"] = sums.mapped / s;
  dict["capacity_tokens"] = sums.capacity / s;
  dict["running"] = sums.running / s;
  dict["waiting"] = sums.waiting / s;
  dict["seconds"] = sums.seconds;
  return dict;
}

nb::dict to_dict(const std::vector<MemorySample>& samples) {
  nb::dict dict;
  dict["at_s"] = column<double>(samples, [](const auto& s) { return seconds(s.at); });
  dict["held_tokens"] = column<uint64_t>(samples, [](const auto& s) { return s.memory.held; });
  dict["reserved_tokens"] = column<uint64_t>(samples, [](const auto& s) { return s.memory.reserved; });
  dict["allocated_tokens"] = column<uint64_t>(samples, [](const auto& s) { return s.memory.allocated; });
  dict["capacity_tokens"] = column<uint64_t>(samples, [](const auto& s) { return s.memory.capacity; });
  dict["running"] = column<uint32_t>(samples, [](const auto& s) { return s.memory.running; });
  dict["waiting"] = column<uint32_t>(samples, [](const auto& s) { return s.memory.waiting; });
  return dict;
}

nb::dict to_dict(const Totals& totals) {
  nb::dict dict;
  dict["steps"] = totals.steps;
  dict["sequence_steps"] = totals.sequence_steps;
  dict["model_tokens"] = totals.tokens;
  dict["device_busy_s"] = seconds(totals.device_busy);
  dict["end_s"] = seconds(totals.end);
  return dict;
}

nb::dict to_dict(const Trace& trace, const Recorder& recorder, const Totals& totals) {
  const std::vector<RequestRecord>& requests = recorder.requests();
  std::vector<double> arrivals;
  for (size_t i = 0; i < trace.size(); ++i) arrivals.push_back(seconds(trace[i].arrival));
  nb::dict dict;
  dict["arrival_s"] = to_array(std::move(arrivals));
  dict["first_scheduled_s"] = column<double>(requests, [](const auto& r) { return seconds(r.first_scheduled); });
  dict["first_token_s"] = column<double>(requests, [](const auto& r) { return seconds(r.first_token); });
  dict["finish_s"] = column<double>(requests, [](const auto& r) { return seconds(r.finish); });
  dict["tokens"] = column<uint32_t>(requests, [](const auto& r) { return r.tokens; });
  dict["preemptions"] = column<uint32_t>(requests, [](const auto& r) { return r.preemptions; });
  dict["cached_tokens"] = column<uint32_t>(requests, [](const auto& r) { return r.cached_tokens; });
  dict["outcome"] = column<uint8_t>(requests, [](const auto& r) { return r.outcome; });
  dict["gaps_s"] = to_array(recorder.gaps_s());
  dict["memory"] = to_dict(recorder.samples());
  dict["averages"] = to_dict(recorder.sums());
  dict["totals"] = to_dict(totals);
  return dict;
}

nb::dict simulate(const Trace& trace, const Device& device, const Options& options, const nb::object& progress,
                  Recorder& recorder, System& system) {
  Totals totals;
  {
    nb::gil_scoped_release released;
    totals = run(trace, system, device, options.clock, recorder, Reporter(progress));
  }
  return to_dict(trace, recorder, totals);
}

Recorder recorder_for(const Trace& trace, const Options& options) {
  return {trace, options.sample_interval, options.measure_from};
}

nb::dict simulate_twinplane(const Trace& trace, const Device& device, const Options& options,
                            const core::Config& config, const core::Pool& pool, uint32_t check_interval,
                            const nb::object& progress) {
  Recorder recorder = recorder_for(trace, options);
  TwinplaneSystem system(trace, config, pool, check_interval, recorder);
  nb::dict dict = simulate(trace, device, options, progress, recorder, system);
  const core::Counters& counters = system.scheduler().counters();
  dict["preempted"] = counters.preemptions;
  dict["blocks_swapped_out"] = counters.blocks_swapped_out;
  dict["blocks_swapped_in"] = counters.blocks_swapped_in;
  dict["prompt_tokens_computed"] = counters.prompt_tokens_computed;
  return dict;
}

Reservation to_reservation(const std::string& name) {
  if (name == "max") return Reservation::kMax;
  if (name == "pow2") return Reservation::kPow2;
  if (name == "oracle") return Reservation::kOracle;
  throw std::invalid_argument("unknown reservation '" + name + "': max, pow2 or oracle");
}

nb::dict simulate_contiguous(const Trace& trace, const Device& device, const Options& options,
                             const std::string& reservation, uint32_t capacity_tokens, uint32_t max_model_len,
                             uint32_t max_batch, const nb::object& progress) {
  Recorder recorder = recorder_for(trace, options);
  ContiguousSystem system(trace, {to_reservation(reservation), capacity_tokens, max_model_len, max_batch}, recorder);
  return simulate(trace, device, options, progress, recorder, system);
}

nb::dict simulate_static(const Trace& trace, const Device& device, const Options& options, uint32_t capacity_tokens,
                         uint32_t max_model_len, uint32_t max_batch, const nb::object& progress) {
  Recorder recorder = recorder_for(trace, options);
  StaticSystem system(trace, {capacity_tokens, max_model_len, max_batch}, recorder);
  return simulate(trace, device, options, progress, recorder, system);
}

nb::dict simulate_prefill_first(const Trace& trace, const Device& device, const Options& options,
                                const core::Pool& pool, uint32_t max_model_len, uint32_t max_batch,
                                uint32_t max_prefill_tokens, const nb::object& progress) {
  Recorder recorder = recorder_for(trace, options);
  PrefillFirstSystem system(trace, {pool, max_model_len, max_batch, max_prefill_tokens}, recorder);
  return simulate(trace, device, options, progress, recorder, system);
}

Trace to_trace(const Input<uint64_t>& arrival_ns, const Input<uint32_t>& prompt_tokens,
               const Input<uint32_t>& output_tokens, const Input<int32_t>& priority, const Input<uint32_t>& samples,
               const Input<uint32_t>& tenant, std::vector<std::string> tenants, const Input<uint64_t>& run_offsets,
               const Input<uint64_t>& run_stream, const Input<uint64_t>& run_first, const Input<uint32_t>& run_length) {
  const size_t n = arrival_ns.size();
  if (prompt_tokens.size() != n || output_tokens.size() != n || priority.size() != n || samples.size() != n ||
      tenant.size() != n) {
    throw std::invalid_argument(
        "arrival_ns, prompt_tokens, output_tokens, priority, samples and tenant must be of one length");
  }
  if (run_first.size() != run_stream.size() || run_length.size() != run_stream.size()) {
    throw std::invalid_argument("run_stream, run_first and run_length must be of one length");
  }
  std::vector<Request> requests(n);
  for (size_t i = 0; i < n; ++i) {
    requests[i] = {.arrival = {arrival_ns.data()[i]},
                   .prompt_tokens = prompt_tokens.data()[i],
                   .output_tokens = output_tokens.data()[i],
                   .priority = priority.data()[i],
                   .tenant = tenant.data()[i],
                   .samples = samples.data()[i]};
  }
  std::vector<Run> runs(run_stream.size());
  for (size_t i = 0; i < runs.size(); ++i) {
    runs[i] = {run_stream.data()[i], run_first.data()[i], run_length.data()[i]};
  }
  std::vector<uint64_t> offsets(run_offsets.data(), run_offsets.data() + run_offsets.size());
  return {std::move(requests), std::move(tenants), std::move(offsets), std::move(runs)};
}

void bind_inputs(nb::module_& m) {
  nb::class_<Trace>(m, "Trace")
      .def(
          "__init__",
          [](Trace* self, const Input<uint64_t>& arrival_ns, const Input<uint32_t>& prompt_tokens,
             const Input<uint32_t>& output_tokens, const Input<int32_t>& priority, const Input<uint32_t>& samples,
             const Input<uint32_t>& tenant, std::vector<std::string> tenants, const Input<uint64_t>& run_offsets,
             const Input<uint64_t>& run_stream, const Input<uint64_t>& run_first, const Input<uint32_t>& run_length) {
            new (self) Trace(to_trace(arrival_ns, prompt_tokens, output_tokens, priority, samples, tenant,
                                      std::move(tenants), run_offsets, run_stream, run_first, run_length));
          },
          nb::kw_only(), "arrival_ns"_a, "prompt_tokens"_a, "output_tokens"_a, "priority"_a, "samples"_a, "tenant"_a,
          "tenants"_a, "run_offsets"_a, "run_stream"_a, "run_first"_a, "run_length"_a)
      .def("__len__", &Trace::size)
      .def("prompt", [](const Trace& trace, size_t i) {
        if (i >= trace.size()) throw nb::index_error("no such request");
        std::vector<int32_t> tokens;
        trace.write_prompt(i, tokens);
        return to_array(std::move(tokens));
      });

  nb::class_<Device>(m, "Device")
      .def(
          "__init__",
          [](Device* self, const Points& by_tokens_ns, double fixed_ns, double per_sequence_ns,
             double per_context_token_ns, double per_pair_ns, double per_swapped_block_ns) {
            for (const double value :
                 {fixed_ns, per_sequence_ns, per_context_token_ns, per_pair_ns, per_swapped_block_ns}) {
              if (!(value >= 0 && value < 1e15)) throw std::invalid_argument("a device's times are numbers from 0");
            }
            new (self) Device{to_curve(by_tokens_ns, "by_tokens_ns"),
                              fixed_ns,
                              per_sequence_ns,
                              per_context_token_ns,
                              per_pair_ns,
                              per_swapped_block_ns};
          },
          nb::kw_only(), "by_tokens_ns"_a, "fixed_ns"_a = 0.0, "per_sequence_ns"_a = 0.0,
          "per_context_token_ns"_a = 0.0, "per_pair_ns"_a = 0.0, "per_swapped_block_ns"_a = 0.0)
      .def(
          "time_ns",
          [](const Device& device, uint32_t tokens, uint32_t sequences, uint64_t context_tokens, uint64_t chunk_pairs,
             uint32_t swapped_blocks) {
            return device.time({tokens, sequences, context_tokens, chunk_pairs, swapped_blocks}).value;
          },
          nb::kw_only(), "tokens"_a, "sequences"_a = 1, "context_tokens"_a = 0, "chunk_pairs"_a = 0,
          "swapped_blocks"_a = 0);

  nb::class_<Options>(m, "Options")
      .def(
          "__init__",
          [](Options* self, const Points& host_ns, uint64_t stop_at_ns, uint64_t sample_interval_ns,
             uint64_t measure_from_ns) {
            new (self) Options(to_options(host_ns, stop_at_ns, sample_interval_ns, measure_from_ns));
          },
          nb::kw_only(), "host_ns"_a = Points{{0, 0}}, "stop_at_ns"_a = 0, "sample_interval_ns"_a = 1'000'000'000,
          "measure_from_ns"_a = 0);

  nb::class_<BuddyAllocator>(m, "BuddyAllocator")
      .def(nb::init<uint32_t>(), "size"_a)
      .def(
          "allocate",
          [](BuddyAllocator& self, uint32_t size) {
            if (size == 0) throw std::invalid_argument("a piece has at least one unit");
            return self.allocate(size);
          },
          "size"_a)
      .def("release", &BuddyAllocator::release, "address"_a)
      .def_prop_ro("size", &BuddyAllocator::size)
      .def_prop_ro("largest", &BuddyAllocator::largest)
      .def_prop_ro("allocated", &BuddyAllocator::allocated);
}

}  // namespace
}  // namespace twinplane::simulator

NB_MODULE(_simulator, m) {
  using namespace twinplane::simulator;
  nb::module_::import_("twinplane.control_plane._core");  // CoreConfig and Pool are its types
  m.doc() = "The production scheduler, and those it is compared to, on a virtual clock. See docs/simulator.md";
  bind_inputs(m);
  m.def("twinplane", &simulate_twinplane, "trace"_a, "device"_a, "options"_a, nb::kw_only(), "config"_a, "pool"_a,
        "check_interval"_a = 0, "progress"_a = nb::none());
  m.def("contiguous", &simulate_contiguous, "trace"_a, "device"_a, "options"_a, nb::kw_only(), "reservation"_a,
        "capacity_tokens"_a, "max_model_len"_a, "max_batch"_a, "progress"_a = nb::none());
  m.def("static", &simulate_static, "trace"_a, "device"_a, "options"_a, nb::kw_only(), "capacity_tokens"_a,
        "max_model_len"_a, "max_batch"_a, "progress"_a = nb::none());
  m.def("prefill_first", &simulate_prefill_first, "trace"_a, "device"_a, "options"_a, nb::kw_only(), "pool"_a,
        "max_model_len"_a, "max_batch"_a, "max_prefill_tokens"_a, "progress"_a = nb::none());
}
