// One plane's end of a session for Python: zero-copy numpy views of the slots, waits without the GIL, and a close()
// that can not pull the mapping from under a thread that waits or an array that is still held.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "shared/csrc/plane_state.hpp"
#include "shared/csrc/ring.hpp"

namespace twinplane::shm {

namespace nb = nanobind;

// What a waiting thread needs. Held by shared_ptr: by the End, by each thread inside a wait, by each array.
struct Link {
  Link(int fd, uint64_t epoch, Plane plane, uint64_t wait_bound_ns)
      : session(fd, epoch, plane),
        incoming(plane == Plane::kData ? step_reader(session) : result_reader(session)),
        outgoing(plane == Plane::kData ? result_writer(session) : step_writer(session)),
        own(plane == Plane::kData ? session.data() : session.control()),
        peer(plane == Plane::kData ? session.control() : session.data()),
        own_bell(plane == Plane::kData ? session.data_bell() : session.control_bell()),
        waiter(own_bell, wait_bound_ns) {}

  Session session;
  RingReader incoming;
  RingWriter outgoing;
  wire::PlaneState& own;
  const wire::PlaneState& peer;
  wire::Bell& own_bell;
  BellWaiter waiter;
  std::atomic<bool> woken{false};    // set by wake(), taken by the wait it ends
  std::atomic<bool> closed{false};   // set by close(), for a thread still inside a wait
  std::atomic<bool> waiting{false};  // a thread is inside a wait: a bell has one waiter

  bool interrupted() const { return woken.load(std::memory_order_acquire) || closed.load(std::memory_order_acquire); }

  // From any thread. The flag is the news, the ring ends the sleep.
  void interrupt(std::atomic<bool>& flag) {
    flag.store(true, std::memory_order_release);
    ring(own_bell);
  }
};

// Waits until `ready()`, wake(), close() or the time-out. The GIL is held on entry and exit, not while asleep. A Python
// signal handler runs at the latest one bound after its signal, and may raise. Returns whether `ready()`.
template <typename Ready>
bool wait(Link& link, uint64_t timeout_ns, Ready ready) {
  if (ready()) return true;
  if (link.waiting.exchange(true)) {
    throw std::runtime_error(
        "two threads wait on one end of a session: its bell wakes only one, give each its own part");
  }
  struct Leave {
    std::atomic<bool>& waiting;
    ~Leave() { waiting.store(false); }
  } leave{link.waiting};

  const uint64_t start = now_ns();
  for (uint64_t elapsed = 0; elapsed < timeout_ns && !link.interrupted(); elapsed = now_ns() - start) {
    {
      nb::gil_scoped_release release;
      link.waiter.wait([&] { return ready() || link.interrupted(); }, timeout_ns - elapsed);
    }
    if (ready()) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  return false;
}

using ReadOnlySlot = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>, nb::c_contig>;
using WritableSlot = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>;

// One numpy array per slot, made once: handing one out costs no more than a reference. Each keeps the mapping alive.
template <typename Array>
std::vector<nb::object> slot_arrays(const std::shared_ptr<Link>& link, const Slots& slots) {
  std::vector<nb::object> arrays;
  for (uint32_t i = 0; i < slots.depth; ++i) {
    nb::capsule owner(new std::shared_ptr<Link>(link),
                      [](void* p) noexcept { delete static_cast<std::shared_ptr<Link>*>(p); });
    const Array array(slots.at(i), {slots.bytes}, owner);
    arrays.push_back(nb::cast(array));
  }
  return arrays;
}

template <Plane kPlane>
class End {
 public:
  End(int fd, uint64_t epoch, uint64_t wait_bound_ns)
      : link_(std::make_shared<Link>(fd, epoch, kPlane, wait_bound_ns)) {
    const Session& session = link_->session;
    const bool data = kPlane == Plane::kData;
    incoming_ = slot_arrays<ReadOnlySlot>(link_, data ? step_slots(session) : result_slots(session));
    outgoing_ = slot_arrays<WritableSlot>(link_, data ? result_slots(session) : step_slots(session));
  }
  ~End() { close(); }

  nb::tuple capacities() const {
    const auto& c = link().session.header().capacities;
    nb::list values;
    for (const uint32_t value : c) values.append(value);
    return nb::tuple(values);
  }

  std::optional<uint64_t> wait_incoming(uint64_t timeout_ns) {
    const std::shared_ptr<Link> held = shared_link();
    // wake() comes first: who asked the loop to look up should not wait behind a full ring.
    const bool news = !held->woken.load(std::memory_order_acquire) &&
                      wait(*held, timeout_ns, [&] { return held->incoming.has_news(); });
    if (held->woken.exchange(false, std::memory_order_acq_rel) || !news || held->closed) return std::nullopt;
    return held->incoming.next();
  }

  nb::object incoming(uint64_t sequence) const {
    link().incoming.slot(sequence);  // raises if it is not open
    return incoming_[sequence % incoming_.size()];
  }

  void consume(uint64_t sequence) { link().incoming.consume(sequence); }

  nb::object outgoing(uint64_t timeout_ns) {
    const std::shared_ptr<Link> held = shared_link();
    const bool room = wait(*held, timeout_ns, [&] { return held->outgoing.has_room(); });
    if (!room || held->closed) return nb::none();
    return outgoing_[held->outgoing.sequence() % outgoing_.size()];
  }

  void publish() {
    RingWriter& writer = link().outgoing;
    // Without this a caller that ignored a None would hand over a slot the reader is still in.
    if (!writer.has_room()) throw std::runtime_error("publish without a free slot: ask for one first, and fill it");
    writer.publish();
  }

  void set_phase(uint32_t phase, uint64_t step) { shm::set_phase(link().own, static_cast<wire::Phase>(phase), step); }
  void beat() { shm::beat(link().own); }

  void start_heartbeat() {
    if (heartbeat_ == nullptr) heartbeat_ = std::make_unique<Heartbeat>(link().own);
  }

  // May come late, from a thread that watches the lifeline: no error after close().
  void wake() const {
    if (link_ != nullptr) link_->interrupt(link_->woken);
  }

  // The data plane asks, the control plane tells.
  uint64_t interrupted() const { return shm::interrupted(link().peer); }
  void interrupt(uint64_t below) { shm::interrupt(link().own, below); }
  nb::dict peer() const { return describe(link().peer); }
  nb::dict own() const { return describe(link().own); }
  uint64_t missed_wakes() const { return link().waiter.missed_wakes(); }

  void close() {
    if (link_ == nullptr) return;
    heartbeat_.reset();
    link_->interrupt(link_->closed);
    incoming_.clear();
    outgoing_.clear();
    link_.reset();
  }

 private:
  const std::shared_ptr<Link>& shared_link() const {
    if (link_ == nullptr) throw nb::value_error("this end of the session is closed");
    return link_;
  }
  Link& link() const { return *shared_link(); }

  static nb::dict describe(const wire::PlaneState& plane) {
    const PlaneSnapshot now = snapshot(plane);
    nb::dict out;
    out["phase"] = now.phase;
    out["phase_step"] = now.phase_step;
    out["phase_since_ns"] = now.phase_since_ns;
    out["heartbeat_ns"] = now.heartbeat_ns;
    out["published"] = now.published;
    out["consumed"] = now.consumed;
    return out;
  }

  std::shared_ptr<Link> link_;  // null once closed
  std::unique_ptr<Heartbeat> heartbeat_;
  std::vector<nb::object> incoming_, outgoing_;  // by slot
};

}  // namespace twinplane::shm
