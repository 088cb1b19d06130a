#include "control_plane/core/python_types.hpp"

#include <nanobind/stl/string.h>

#include <span>
#include <string>

namespace nb = nanobind;

namespace twinplane::core {
namespace {

// Named-tuple classes of the module. Borrowed: the module lives as long as the interpreter.
PyObject* event_type;
PyObject* refusal_type;
PyObject* stats_type;

PyObject* named_tuple(nb::module_& module, const char* name, const char* fields) {
  const nb::object type = nb::module_::import_("collections").attr("namedtuple")(name, fields);
  type.attr("__module__") = module.attr("__name__");
  module.attr(name) = type;
  return type.ptr();
}

template <typename T>
nb::list to_list(std::span<const T> values) {
  nb::list list;
  for (const T value : values) list.append(nb::cast(value));
  return list;
}

// Nanoseconds between two moments; 0 if the later one never came.
uint64_t between(Nanos from, Nanos to) { return to == Nanos{0} ? 0 : (to - from).value; }

nb::dict to_dict(const shm::PlaneSnapshot& plane) {
  nb::dict dict;
  dict["phase"] = plane.phase;
  dict["phase_step"] = plane.phase_step;
  dict["phase_since_ns"] = plane.phase_since_ns;
  dict["heartbeat_ns"] = plane.heartbeat_ns;
  dict["published"] = plane.published;
  dict["consumed"] = plane.consumed;
  return dict;
}

nb::dict to_dict(const Sequence& s) {
  nb::dict dict;
  dict["id"] = s.id.value;
  dict["state"] = s.state == SequenceState::kRunning ? "running" : "waiting";
  dict["arrival"] = s.arrival;
  dict["priority"] = s.params.priority;
  dict["tenant"] = s.params.tenant;
  dict["prompt_tokens"] = s.prompt_tokens.value;
  dict["num_tokens"] = s.num_tokens.value;
  dict["num_pending"] = s.num_pending.value;
  dict["num_computed"] = s.num_computed.value;
  dict["limit"] = s.limit.value;
  dict["row"] = s.row == kNoRow ? nb::none() : nb::cast(s.row.value);
  nb::list blocks;
  for (uint32_t i = 0; i < s.num_blocks.value; ++i) {
    blocks.append(i < s.missing_blocks.value ? nb::none() : nb::cast(s.blocks[i].value));
  }
  dict["blocks"] = blocks;
  dict["group"] = s.id.value - s.index;
  dict["is_beam"] = s.num_candidates != 0;
  dict["is_following"] = s.is_following;
  dict["is_protected"] = s.is_protected;
  dict["overtaken"] = s.overtaken;
  dict["was_resident"] = s.was_resident;
  dict["preemptions"] = s.preemptions;
  dict["failed_steps"] = s.failed_steps;
  return dict;
}

nb::list to_list(const Line& line) {
  nb::list list;
  for (size_t i = 0; i < line.size(); ++i) list.append(to_dict(line[i]));
  return list;
}

}  // namespace

void add_named_tuples(nb::module_& module) {
  event_type = named_tuple(module, "Event",
                           "request_id tokens logprobs ranks finish match cached_tokens preemptions queued_ns "
                           "prefill_ns decode_ns estimate_ns score");
  refusal_type = named_tuple(module, "Refusal", "reason limit asked message unit");
  stats_type = named_tuple(module, "Stats",
                           "running waiting waiting_tokens blocks_total blocks_free blocks_cached blocks_referenced "
                           "blocks_fenced steps_sent steps_retired tokens_emitted prompt_tokens_computed cached_tokens "
                           "preemptions blocks_swapped_out blocks_swapped_in "
                           "finished refused ticks tick_ns_total tick_ns_max host_gap_ns_total missed_wakes "
                           "last_step_ns step_us predicted_us step_margin chunk_allowance steps_with_decodes "
                           "steps_over_target dequeued dequeued_tokens results_taken steps_interrupted "
                           "apply_us_total forward_us_total sample_us_total");
}

nb::object to_event(const Sequence& s, uint32_t from, uint32_t to, bool is_last) {
  const size_t count = to - from;
  const std::span<const int32_t> tokens(s.tokens + s.prompt_tokens.value + from, count);
  nb::list logprobs, ranks;
  for (size_t i = from; i < to && s.choices != nullptr; ++i) {
    logprobs.append(s.choices[i].logprob);
    ranks.append(s.choices[i].rank);
  }
  // Which fields may be read when: request.hpp. A request that ends before it is scheduled has no times.
  const bool has_token = to != 0;
  return nb::handle(event_type)(
      s.id.value, to_list(tokens), logprobs, ranks, static_cast<int>(is_last ? s.finish : FinishReason::kNone),
      is_last ? s.match : -1, s.cached_tokens.value, is_last ? s.preemptions : 0,
      is_last || has_token ? between(s.submitted, s.first_scheduled) : 0,
      has_token ? between(s.first_scheduled, s.first_token) : 0,
      is_last && has_token ? between(s.first_token, s.last_token) : 0, is_last ? s.estimate.value : 0, s.score);
}

nb::object to_refusal(const std::optional<Refusal>& refusal) {
  if (!refusal) return nb::none();
  return nb::handle(refusal_type)(refusal->reason, refusal->limit, refusal->asked, refusal->message, refusal->unit);
}

nb::object to_stats(const Stats& s, uint64_t refused) {
  const Counters& c = s.counters;
  return nb::handle(stats_type)(
      s.running, s.waiting, s.waiting_tokens, s.blocks_total, s.blocks_free, s.blocks_cached, s.blocks_referenced,
      s.blocks_fenced, c.steps_sent, c.steps_retired, c.tokens_emitted, c.prompt_tokens_computed, c.cached_tokens,
      c.preemptions, c.blocks_swapped_out, c.blocks_swapped_in, to_list(std::span<const uint64_t>(c.finished)), refused,
      c.ticks, s.tick_ns_total, s.tick_ns_max, c.host_gap_ns, s.missed_wakes, c.last_step_ns, c.step_us, c.predicted_us,
      c.step_margin, c.chunk_allowance, c.steps_with_decodes, c.steps_over_target, s.dequeued, s.dequeued_tokens,
      c.results_taken, c.steps_interrupted, c.apply_us, c.forward_us, c.sample_us);
}

nb::dict to_dict(const std::optional<PeerView>& peer) {
  if (!peer) return nb::dict();
  nb::dict dict;
  dict["data"] = to_dict(peer->data);
  dict["control"] = to_dict(peer->control);
  dict["fault"] = peer->fault;
  return dict;
}

nb::dict snapshot(const Scheduler& scheduler) {
  nb::dict dict;
  dict["running"] = to_list(scheduler.population().running);
  dict["waiting"] = to_list(scheduler.population().waiting);
  nb::list tenants;
  for (uint16_t i = 0; scheduler.shares() && i < FairShare::kMaxTenants; ++i) {
    const FairShare& shares = *scheduler.shares();
    if (shares.service({i}) == 0 && shares.num_live({i}) == 0) continue;
    nb::dict tenant;
    tenant["name"] = std::string(shares.name({i}));
    tenant["service"] = shares.service({i});
    tenant["live"] = shares.num_live({i});
    tenant["waiting"] = shares.num_waiting({i});
    tenants.append(tenant);
  }
  dict["tenants"] = tenants;
  if (const auto& session = scheduler.session()) {
    dict["sent"] = session->sent.value;
    dict["retired"] = session->retired.value;
    nb::list references;
    for (uint32_t b = 0; b < session->blocks.total().value; ++b)
      references.append(session->blocks.pool().references({b}));
    dict["block_references"] = references;
    nb::list free;
    for (const BlockId block : session->blocks.pool().free_blocks()) free.append(block.value);
    dict["free_blocks"] = free;
    nb::list fenced;
    session->blocks.pool().fenced_blocks().for_each([&](BlockId block) { fenced.append(block.value); });
    dict["fenced_blocks"] = fenced;
    nb::list tree;
    session->blocks.tree().check([&](BlockId block) { tree.append(block.value); });
    dict["tree_blocks"] = tree;
    dict["cached_blocks"] = session->blocks.cached().value;
    nb::list owners;
    for (uint32_t r = 0; r < session->rows.size(); ++r) {
      const Sequence* const owner = session->rows.owner({r});
      owners.append(owner == nullptr ? nb::none() : nb::cast(owner->id.value));
    }
    dict["row_owners"] = owners;
  }
  return dict;
}

}  // namespace twinplane::core
