// Python binding of the protocol; its surface is described in _shm.pyi.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <system_error>
#include <vector>

#include "shared/csrc/end.hpp"
#include "shared/csrc/measure.hpp"

namespace twinplane::shm {
namespace {

using namespace nb::literals;

wire::Capacities to_capacities(const std::vector<uint32_t>& values) {
  wire::Capacities out{};
  if (values.size() * sizeof(uint32_t) != sizeof(out)) {
    throw nb::value_error(("expected " + std::to_string(sizeof(out) / sizeof(uint32_t)) + " capacities, got " +
                           std::to_string(values.size()))
                              .c_str());
  }
  std::memcpy(&out, values.data(), sizeof(out));
  return out;
}

uint64_t segment_bytes(const std::vector<uint32_t>& values) {
  const wire::Capacities capacities = to_capacities(values);
  check_capacities(capacities);
  return wire::SegmentLayout(capacities).bytes;
}

// The compiler's idea of where every region lies, for comparison with the generated Python.
nb::dict region_offsets(const std::vector<uint32_t>& values) {
  const wire::Capacities c = to_capacities(values);
  const wire::StepSlotLayout step(c);
  const wire::ResultSlotLayout result(c);
  const wire::SegmentLayout segment(c);
  nb::dict steps, results, segments;
  steps["header"] = step.header;
  steps["seqs"] = step.seqs;
  steps["token_ids"] = step.token_ids;
  steps["closes"] = step.closes;
  steps["opens"] = step.opens;
  steps["table_writes"] = step.table_writes;
  steps["forks"] = step.forks;
  steps["swap_outs"] = step.swap_outs;
  steps["swap_ins"] = step.swap_ins;
  steps["copies"] = step.copies;
  steps["extras"] = step.extras;
  steps["bytes"] = step.bytes;
  results["header"] = result.header;
  results["entries"] = result.entries;
  results["candidates"] = result.candidates;
  results["bytes"] = result.bytes;
  segments["header"] = segment.header;
  segments["control"] = segment.control;
  segments["data"] = segment.data;
  segments["control_bell"] = segment.control_bell;
  segments["data_bell"] = segment.data_bell;
  segments["steps"] = segment.steps;
  segments["results"] = segment.results;
  segments["bytes"] = segment.bytes;
  nb::dict out;
  out["StepSlotLayout"] = steps;
  out["ResultSlotLayout"] = results;
  out["SegmentLayout"] = segments;
  return out;
}

// A trap for tests: the process gets `signal` when it passes `point` for the `left`-th time.
struct Trap {
  Point point = Point::kCount;
  int signal = 0;
  std::atomic<int64_t> left{0};
};
Trap trap;

void spring(Point point) {
  if (point == trap.point && trap.left.fetch_sub(1) == 1) kill(getpid(), trap.signal);
}

void signal_at(const std::string& name, int64_t passage, int signal) {
  for (size_t i = 0; i < kPointNames.size(); ++i) {
    if (name != kPointNames[i]) continue;
    trap.point = static_cast<Point>(i);
    trap.signal = signal;
    trap.left = passage;
    point_hook.store(spring);
    return;
  }
  throw nb::key_error(name.c_str());
}

void translate_system_error(const std::exception_ptr& exception, void*) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::system_error& error) {
    const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

// The two ends have the same methods; only the names of what comes in and goes out differ.
template <Plane kPlane>
nb::class_<End<kPlane>> bind_end(nb::module_& m, const char* name, const char* doc) {
  using E = End<kPlane>;
  return nb::class_<E>(m, name, doc)
      .def(nb::init<int, uint64_t, uint64_t>(), "fd"_a, "epoch"_a, nb::kw_only(), "wait_bound_ns"_a = kWaitBoundNs)
      .def_prop_ro("capacities", &E::capacities)
      .def("consume", &E::consume, "sequence"_a)
      .def("publish", &E::publish)
      .def("set_phase", &E::set_phase, "phase"_a, "step"_a)
      .def("wake", &E::wake)
      .def("beat", &E::beat)
      .def("start_heartbeat", &E::start_heartbeat)
      .def("peer", &E::peer)
      .def("own", &E::own)
      .def_prop_ro("missed_wakes", &E::missed_wakes)
      .def("close", &E::close);
}

}  // namespace

NB_MODULE(_shm, m) {
  m.doc() = "Rings, doorbells, mapping and heartbeat of the protocol between the planes (PROTOCOL.md).";
  m.attr("WAIT_BOUND_NS") = kWaitBoundNs;
  m.attr("HEARTBEAT_NS") = kHeartbeatNs;
  m.attr("LAYOUT_HASH") = wire::kLayoutHash;
  nb::list points;
  for (const std::string_view name : kPointNames) points.append(nb::str(name.data(), name.size()));
  m.attr("POINTS") = nb::tuple(points);

  nb::register_exception_translator(translate_system_error);
  nb::exception<ProtocolError>(m, "ProtocolError");

  m.def("segment_bytes", &segment_bytes, "capacities"_a);
  m.def(
      "format_segment",
      [](int fd, const std::vector<uint32_t>& capacities, uint64_t epoch) {
        return format_segment(fd, to_capacities(capacities), epoch);
      },
      "fd"_a, "capacities"_a, "epoch"_a);
  m.def("region_offsets", &region_offsets, "capacities"_a);
  m.def("signal_at", &signal_at, "point"_a, "passage"_a, "signal"_a);

  const nb::call_guard<nb::gil_scoped_release> no_gil;
  m.def("measure_ring", &measure_ring, "fd"_a, "epoch"_a, "count"_a, "bytes"_a, no_gil);
  m.def("answer_ring", &answer_ring, "fd"_a, "epoch"_a, "count"_a, "bytes"_a, no_gil);
  m.def("measure_futex", &measure_futex, "fd"_a, "count"_a, no_gil);
  m.def("answer_futex", &answer_futex, "fd"_a, "count"_a, no_gil);

  using Data = End<Plane::kData>;
  bind_end<Plane::kData>(m, "DataEnd", "The data plane's end: reads steps, writes results.")
      .def("wait_step", &Data::wait_incoming, "timeout_ns"_a)
      .def("step", &Data::incoming, "sequence"_a)
      .def("result_slot", &Data::outgoing, "timeout_ns"_a)
      .def("interrupted", &Data::interrupted);

  using Control = End<Plane::kControl>;
  bind_end<Plane::kControl>(m, "ControlEnd", "The control plane's end: writes steps, reads results.")
      .def("step_slot", &Control::outgoing, "timeout_ns"_a)
      .def("wait_result", &Control::wait_incoming, "timeout_ns"_a)
      .def("result", &Control::incoming, "sequence"_a)
      .def("interrupt", &Control::interrupt, "below"_a);
}

}  // namespace twinplane::shm
