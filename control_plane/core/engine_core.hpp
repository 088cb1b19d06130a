// The scheduler on a thread of its own, between a command queue, a session's rings and an event queue.
//
//   callers --commands--> +------------------+ --steps----> data plane
//           --tasks-----> |  the core thread | <--results--
//   poller  <--events---- +------------------+
//
// The thread never takes the GIL, and it sleeps on one bell: callers ring it, and so does the data plane.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <semaphore>
#include <span>
#include <string>
#include <thread>

#include "control_plane/core/command_queue.hpp"
#include "control_plane/core/event_queue.hpp"
#include "control_plane/core/gate.hpp"
#include "control_plane/core/scheduler.hpp"
#include "control_plane/core/stats.hpp"
#include "shared/csrc/mapping.hpp"
#include "shared/csrc/plane_state.hpp"
#include "shared/csrc/ring.hpp"
#include "shared/csrc/stable_bell.hpp"

namespace twinplane::core {

// An eventfd: readable from signal() until clear(). Throws std::system_error.
class EventFd {
 public:
  EventFd();
  ~EventFd();
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;

  int fd() const { return fd_; }
  void signal() const;
  void clear() const;

 private:
  int fd_;
};

// Both planes' pages of the mapping.
struct PeerView {
  shm::PlaneSnapshot data;
  shm::PlaneSnapshot control;
  std::string fault;  // what the data plane did against the protocol; "" = nothing
};

class EngineCore {
 public:
  explicit EngineCore(const Config& config);
  ~EngineCore() { stop(); }

  // --- life; one thread at a time ----------------------------------------------------------------------------------

  // Throws std::logic_error if it was started before.
  void start();

  // Ends the thread; live requests end as kStopped. Idempotent.
  void stop();

  // --- sessions; return when the core's thread has done it, throw what it threw -------------------------------------

  // Maps the segment and begins a session on it; the fd is needed only during the call. Throws shm::ProtocolError,
  // std::invalid_argument, std::logic_error.
  void attach(int segment_fd, const wire::Capacities& capacities, uint64_t epoch, const Pool& pool);

  // The data plane is ready: steps may be sent. `swap_block` is what it takes to move one block to the host's pool and
  // back, 0 = unknown.
  void activate(Nanos swap_block);

  // The data plane is gone. When this returns the core has let go of the mapping.
  void detach(SessionEnd end);

  // --- requests; any thread ----------------------------------------------------------------------------------------

  std::optional<Refusal> submit(RequestId id, std::span<const int32_t> prompt, RequestParams params);
  void cancel(RequestId id);

  // Nothing cached so far is found any more. Waits for the core's thread.
  void reset_prefix_cache();

  // --- events; one thread at a time --------------------------------------------------------------------------------

  // Readable when poll() has something.
  int event_fd() const { return event_fd_.fd(); }

  // See EventQueue::poll.
  template <typename Visit>
  void poll(Visit visit) {
    event_fd_.clear();  // before looking: whatever comes after this signals again
    events_.poll([&](const Sequence& sequence, uint32_t from, uint32_t to, bool is_last) {
      visit(sequence, from, to, is_last);
      if (is_last) gate_.forget(sequence.id);
    });
    commands_.free_spent();
  }

  // --- looking; any thread -----------------------------------------------------------------------------------------

  Stats stats() const;
  uint64_t refused() const { return gate_.refused(); }
  std::optional<PeerView> peer() const;

 private:
  // A session's mapping and this plane's ends of its rings.
  struct Link {
    Link(int fd, uint64_t epoch)
        : mapping(fd, epoch, shm::Plane::kControl),
          steps(shm::step_writer(mapping)),
          results(shm::result_reader(mapping)) {}

    wire::PlaneState& own() const { return mapping.control(); }

    shm::Session mapping;
    shm::RingWriter steps;
    shm::RingReader results;
    bool is_active = false;
  };

  // Runs `work` on the core's thread, and waits for it.
  void on_core(const std::function<void()>& work);

  void run();
  bool run_task();
  bool drain_commands();
  void tell_interrupt();
  bool take_results();
  bool send_steps();
  void tell_poller();
  void publish_stats();
  bool has_news() const;
  void set_phase(wire::Phase phase);
  void attach_on_core(int segment_fd, const wire::Capacities& capacities, uint64_t epoch, const Pool& pool);
  void detach_on_core(SessionEnd end);

  Gate gate_;
  CommandQueue commands_;
  shm::StableBell bell_;  // what the core's thread sleeps on, whatever session there is
  shm::BellWaiter waiter_{bell_.bell()};
  EventFd event_fd_;
  Scheduler scheduler_;
  EventQueue events_;  // after the scheduler: what is live is the scheduler's to free, and this one looks at it first
  StatsBoard board_;

  // Touched by the core's thread alone.
  std::shared_ptr<Link> link_;
  uint64_t tick_ns_total_ = 0;
  uint64_t tick_ns_max_ = 0;

  // For peer(): the mapping must not go away while somebody looks. The core locks it only when a session begins or
  // ends, and for a fault.
  mutable std::mutex view_mutex_;
  std::shared_ptr<const Link> view_;
  std::string fault_;

  std::mutex task_mutex_;  // callers of on_core(), one at a time
  std::atomic<const std::function<void()>*> task_{nullptr};
  std::exception_ptr task_error_;
  std::binary_semaphore task_done_{0};

  std::atomic<bool> is_running_{false};
  bool has_started_ = false;
  std::thread thread_;
};

}  // namespace twinplane::core
