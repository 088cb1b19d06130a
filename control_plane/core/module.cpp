// twinplane.control_plane._core: the Python surface of the core. Contract: CONTRACT.md, _core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "control_plane/core/engine_core.hpp"
#include "control_plane/core/python_types.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace twinplane::core {
namespace {

using Prompt = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A negative id would be taken for a relay by the data plane.
std::span<const int32_t> checked(const Prompt& prompt) {
  const std::span<const int32_t> tokens(prompt.data(), prompt.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0) continue;
    throw std::invalid_argument("token " + std::to_string(tokens[i]) + " at position " + std::to_string(i) +
                                " of the prompt is negative");
  }
  return tokens;
}

// A digest of 32 bytes, or nothing.
Namespace to_namespace(const nb::bytes& digest) {
  Namespace key{};
  if (digest.size() != 0 && digest.size() != sizeof(key)) {
    throw std::invalid_argument("cache_key has " + std::to_string(digest.size()) + " bytes, it must have 0 or 32");
  }
  std::memcpy(key.data(), digest.data(), digest.size());
  return key;
}

// A beam search takes the likeliest tokens, so nothing that draws or edits by history goes with it.
BeamParams to_beams(const RequestParams& params, uint32_t width, float length_penalty, int early_stopping) {
  if (params.n != 1)
    throw std::invalid_argument("n is " + std::to_string(params.n) + " and beam_width is set: use one");
  if (params.sampling.temperature != 0.0f || params.sampling.has_penalties() || params.logprobs) {
    throw std::invalid_argument("beam_width goes with temperature 0, and without penalties and logprobs");
  }
  if (early_stopping < 0 || early_stopping > 2) {
    throw std::invalid_argument("early_stopping is " + std::to_string(early_stopping) + ", it must be 0, 1 or 2");
  }
  return {width, length_penalty, static_cast<EarlyStopping>(early_stopping)};
}

wire::Capacities to_capacities(const std::vector<uint32_t>& values) {
  wire::Capacities capacities;
  if (values.size() * sizeof(uint32_t) != sizeof(capacities)) {
    throw std::invalid_argument(std::to_string(values.size()) + " capacities given, the schema has " +
                                std::to_string(sizeof(capacities) / sizeof(uint32_t)));
  }
  std::memcpy(&capacities, values.data(), sizeof(capacities));
  return capacities;
}

nb::tuple from_capacities(const wire::Capacities& c) {
  return nb::make_tuple(c.ring_depth, c.max_rows, c.max_step_tokens, c.max_table_writes, c.max_copies,
                        c.max_extra_words, c.max_results, c.max_swaps, c.max_candidates);
}

Policy to_policy(const std::string& name) {
  if (name == "fcfs") return Policy::kFcfs;
  if (name == "priority") return Policy::kPriority;
  if (name == "fair") return Policy::kFair;
  throw std::invalid_argument("policy is '" + name + "', it must be fcfs, priority or fair");
}

SessionEnd session_end(bool step_failed) { return step_failed ? SessionEnd::kStepFailed : SessionEnd::kLost; }

// The scheduler with a gate, an event queue and one step slot in plain memory.
class LocalScheduler {
 public:
  explicit LocalScheduler(const Config& config) : gate_(config), scheduler_(config, gate_, events_) {}

  void attach(const Pool& pool, const std::vector<uint32_t>& capacities) {
    scheduler_.attach(pool, to_capacities(capacities));
    slot_.assign(wire::StepSlotLayout(to_capacities(capacities)).bytes, std::byte{0});
  }
  void detach(bool step_failed) { scheduler_.detach(session_end(step_failed)); }

  nb::object submit(uint64_t id, const Prompt& prompt, const RequestParams& params, uint64_t now_ns) {
    return to_refusal(gate_.enter({id}, checked(prompt), params, {now_ns}, [this](std::unique_ptr<Sequence> sequence) {
      scheduler_.accept(std::move(sequence));
    }));
  }
  bool cancel(uint64_t id) { return scheduler_.cancel({id}); }
  void reset_prefix_cache() { scheduler_.reset_prefix_cache(); }

  nb::object tick(uint64_t now_ns) {
    if (!scheduler_.tick(slot_.data(), {now_ns})) return nb::none();
    return nb::bytes(slot_.data(), slot_.size());
  }

  uint64_t interrupted() const { return scheduler_.interrupted().value; }

  void retire(const nb::bytes& result, uint64_t now_ns) {
    if (!scheduler_.session()) throw std::logic_error("a result without a session");
    const uint64_t expected = wire::ResultSlotLayout(scheduler_.session()->capacities).bytes;
    if (result.size() != expected) {
      throw std::invalid_argument("a result of " + std::to_string(result.size()) + " bytes, a slot has " +
                                  std::to_string(expected));
    }
    scheduler_.retire(static_cast<const std::byte*>(result.data()), {now_ns});
  }

  nb::list poll() {
    nb::list list;
    events_.flush();
    events_.poll([&](const Sequence& sequence, uint32_t from, uint32_t to, bool is_last) {
      list.append(to_event(sequence, from, to, is_last));
      if (is_last) gate_.forget(sequence.id);
    });
    return list;
  }

  nb::object stats() const {
    Stats stats = stats_of(scheduler_);
    add_queue(stats, gate_);
    return to_stats(stats, gate_.refused());
  }

  void check() const {
    if (const std::string difference = scheduler_.check(); !difference.empty()) throw std::runtime_error(difference);
    if (gate_.waiting_requests() != scheduler_.population().waiting.size()) {
      throw std::runtime_error("the gate counts " + std::to_string(gate_.waiting_requests()) + " waiting requests, " +
                               std::to_string(scheduler_.population().waiting.size()) + " wait");
    }
  }

  nb::dict snapshot() const { return core::snapshot(scheduler_); }

 private:
  Gate gate_;
  Scheduler scheduler_;
  EventQueue events_;
  std::vector<std::byte> slot_;
};

nb::list poll(EngineCore& core) {
  nb::list list;
  core.poll([&](const Sequence& sequence, uint32_t from, uint32_t to, bool is_last) {
    list.append(to_event(sequence, from, to, is_last));
  });
  return list;
}

void bind_params(nb::module_& m) {
  nb::class_<RequestParams>(m, "RequestParams")
      .def(
          "__init__",
          [](RequestParams* self, uint32_t max_tokens, std::vector<int32_t> eos_token_ids,
             std::vector<int32_t> stop_token_ids, uint32_t min_tokens, float temperature, float top_p, uint32_t top_k,
             float min_p, float repetition_penalty, float presence_penalty, float frequency_penalty, uint64_t seed,
             uint32_t stream, bool logprobs, std::vector<std::pair<int32_t, float>> logit_bias,
             std::vector<int32_t> allowed_token_ids, int32_t priority, uint64_t deadline_ns, bool cache,
             const nb::bytes& cache_key, std::string tenant, uint32_t n, uint32_t beam_width, float length_penalty,
             int early_stopping) {
            if (max_tokens == 0) throw std::invalid_argument("max_tokens is 0, it must be at least 1");
            if (n == 0) throw std::invalid_argument("n is 0, it must be at least 1");
            new (self) RequestParams{.max_tokens = {max_tokens},
                                     .min_tokens = {min_tokens},
                                     .eos_token_ids = std::move(eos_token_ids),
                                     .stop_token_ids = std::move(stop_token_ids),
                                     .sampling = {.temperature = temperature,
                                                  .top_p = top_p,
                                                  .min_p = min_p,
                                                  .top_k = top_k,
                                                  .repetition_penalty = repetition_penalty,
                                                  .presence_penalty = presence_penalty,
                                                  .frequency_penalty = frequency_penalty,
                                                  .seed = seed,
                                                  .stream = stream,
                                                  .logit_bias = std::move(logit_bias),
                                                  .allowed_token_ids = std::move(allowed_token_ids)},
                                     .n = n,
                                     .beams = {},
                                     .logprobs = logprobs,
                                     .priority = priority,
                                     .deadline = {deadline_ns},
                                     .uses_cache = cache,
                                     .cache_key = to_namespace(cache_key),
                                     .tenant = std::move(tenant)};
            if (beam_width > 1) self->beams = to_beams(*self, beam_width, length_penalty, early_stopping);
          },
          nb::kw_only(), "max_tokens"_a, "eos_token_ids"_a = std::vector<int32_t>{},
          "stop_token_ids"_a = std::vector<int32_t>{}, "min_tokens"_a = 0, "temperature"_a = 0.0f, "top_p"_a = 1.0f,
          "top_k"_a = 0, "min_p"_a = 0.0f, "repetition_penalty"_a = 1.0f, "presence_penalty"_a = 0.0f,
          "frequency_penalty"_a = 0.0f, "seed"_a = 0, "stream"_a = 0, "logprobs"_a = false,
          "logit_bias"_a = std::vector<std::pair<int32_t, float>>{}, "allowed_token_ids"_a = std::vector<int32_t>{},
          "priority"_a = 0, "deadline_ns"_a = 0, "cache"_a = true, "cache_key"_a = nb::bytes("", 0), "tenant"_a = "",
          "n"_a = 1, "beam_width"_a = 0, "length_penalty"_a = 1.0f, "early_stopping"_a = 0);
}

void bind_config(nb::module_& m) {
  nb::class_<Config>(m, "CoreConfig")
      .def(
          "__init__",
          [](Config* self, uint32_t max_rows, uint32_t max_step_tokens, uint32_t max_chunk_tokens, uint32_t depth,
             uint32_t max_substeps, uint32_t max_waiting_requests, uint64_t max_waiting_tokens, uint32_t max_model_len,
             uint32_t itl_target_us, const std::string& policy,
             std::vector<std::pair<std::string, uint32_t>> tenant_weights, uint32_t max_overtaken) {
            const Config config{.max_rows = max_rows,
                                .max_step_tokens = {max_step_tokens},
                                .max_chunk_tokens = {max_chunk_tokens},
                                .depth = depth,
                                .max_substeps = max_substeps,
                                .max_waiting_requests = max_waiting_requests,
                                .max_waiting_tokens = max_waiting_tokens,
                                .max_model_len = {max_model_len},
                                .itl_target_us = itl_target_us,
                                .policy = to_policy(policy),
                                .tenant_weights = std::move(tenant_weights),
                                .max_overtaken = max_overtaken};
            config.validate();
            new (self) Config(config);
          },
          nb::kw_only(), "max_rows"_a = 64, "max_step_tokens"_a = 2048, "max_chunk_tokens"_a = 512, "depth"_a = 2,
          "max_substeps"_a = 1, "max_waiting_requests"_a = 1024, "max_waiting_tokens"_a = 1 << 20,
          "max_model_len"_a = 2048, "itl_target_us"_a = 0, "policy"_a = "priority",
          "tenant_weights"_a = std::vector<std::pair<std::string, uint32_t>>{}, "max_overtaken"_a = 0);
  nb::class_<Pool>(m, "Pool").def(
      "__init__",
      [](Pool* self, uint32_t num_blocks, uint32_t block_size, uint32_t num_host_blocks, uint32_t swap_block_ns) {
        if (num_blocks == 0 || block_size == 0)
          throw std::invalid_argument("a pool has at least one block of one token");
        new (self) Pool{{num_blocks}, {block_size}, {num_host_blocks}, swap_block_ns};
      },
      nb::kw_only(), "num_blocks"_a, "block_size"_a, "num_host_blocks"_a = 0, "swap_block_ns"_a = 0);
  m.def(
      "capacities_for",
      [](const Config& config, const Pool& pool) { return from_capacities(capacities_for(config, pool)); }, "config"_a,
      "pool"_a);
}

void bind_scheduler(nb::module_& m) {
  nb::class_<LocalScheduler>(m, "Scheduler")
      .def(nb::init<const Config&>(), "config"_a)
      .def("attach", &LocalScheduler::attach, "pool"_a, "capacities"_a)
      .def("detach", &LocalScheduler::detach, nb::kw_only(), "step_failed"_a = false)
      .def("submit", &LocalScheduler::submit, "request_id"_a, "prompt"_a, "params"_a, "now_ns"_a)
      .def("cancel", &LocalScheduler::cancel, "request_id"_a)
      .def("reset_prefix_cache", &LocalScheduler::reset_prefix_cache)
      .def("tick", &LocalScheduler::tick, "now_ns"_a)
      .def_prop_ro("interrupted", &LocalScheduler::interrupted)
      .def("retire", &LocalScheduler::retire, "result"_a, "now_ns"_a)
      .def("poll", &LocalScheduler::poll)
      .def("stats", &LocalScheduler::stats)
      .def("check", &LocalScheduler::check)
      .def("snapshot", &LocalScheduler::snapshot);
}

// Calls that wait for the core's thread release the GIL. The thread itself never takes it.
void bind_engine(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<EngineCore>(m, "EngineCore")
      .def(nb::init<const Config&>(), "config"_a)
      .def_prop_ro("event_fd", &EngineCore::event_fd)
      .def("start", &EngineCore::start)
      .def("stop", &EngineCore::stop, Released())
      .def(
          "attach",
          [](EngineCore& self, int segment_fd, const std::vector<uint32_t>& capacities, uint64_t epoch,
             const Pool& pool) { self.attach(segment_fd, to_capacities(capacities), epoch, pool); },
          "segment_fd"_a, "capacities"_a, "epoch"_a, "pool"_a, Released())
      .def(
          "activate", [](EngineCore& self, uint64_t swap_block_ns) { self.activate({swap_block_ns}); }, nb::kw_only(),
          "swap_block_ns"_a = 0, Released())
      .def("reset_prefix_cache", &EngineCore::reset_prefix_cache, Released())
      .def(
          "detach", [](EngineCore& self, bool step_failed) { self.detach(session_end(step_failed)); }, nb::kw_only(),
          "step_failed"_a = false, Released())
      .def(
          "submit",
          [](EngineCore& self, uint64_t id, const Prompt& prompt, const RequestParams& params) {
            return to_refusal(self.submit({id}, checked(prompt), params));
          },
          "request_id"_a, "prompt"_a, "params"_a)
      .def(
          "cancel", [](EngineCore& self, uint64_t id) { self.cancel({id}); }, "request_id"_a)
      .def("poll", &poll)
      .def("stats", [](const EngineCore& self) { return to_stats(self.stats(), self.refused()); })
      .def("peer", [](const EngineCore& self) { return to_dict(self.peer()); });
}

}  // namespace
}  // namespace twinplane::core

NB_MODULE(_core, m) {
  using namespace twinplane::core;
  // It translates shm::ProtocolError, which attach() may throw, for every module of this build.
  nb::module_::import_("twinplane.shared._shm");
  m.doc() = "Native scheduler of the control plane. Contract: control_plane/CONTRACT.md";
  const std::array<const char*, kNumFinishReasons> names = {
      "FINISH_NONE",      "FINISH_EOS",        "FINISH_STOP_TOKEN", "FINISH_LENGTH",
      "FINISH_CANCELLED", "FINISH_DEADLINE",   "FINISH_NOT_FINITE", "FINISH_QUARANTINED",
      "FINISH_STOPPED",   "FINISH_NEVER_FITS", "FINISH_UNREACHABLE"};
  for (size_t i = 0; i < names.size(); ++i) m.attr(names[i]) = i;
  add_named_tuples(m);
  bind_params(m);
  bind_config(m);
  bind_scheduler(m);
  bind_engine(m);
}
