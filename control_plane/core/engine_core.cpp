#include "control_plane/core/engine_core.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "shared/csrc/clock.hpp"

namespace twinplane::core {

EventFd::EventFd() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

EventFd::~EventFd() { close(fd_); }

// Both calls can fail only with EAGAIN: the counter is full, so it is readable anyway; or it is zero already.
void EventFd::signal() const {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(fd_, &one, sizeof(one));
}

void EventFd::clear() const {
  uint64_t count;
  [[maybe_unused]] const auto got = read(fd_, &count, sizeof(count));
}

EngineCore::EngineCore(const Config& config) : gate_(config), scheduler_(config, gate_, events_) {}

// --- life ------------------------------------------------------------------------------------------------------------

void EngineCore::start() {
  if (has_started_) throw std::logic_error("the core was started before; make a new one");
  has_started_ = true;
  is_running_.store(true, std::memory_order_release);
  // The thread inherits a full signal mask: handlers belong to the main thread.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void EngineCore::stop() {
  gate_.close();  // nothing is submitted after this, so the drain below is the last one
  if (thread_.joinable()) {
    const std::lock_guard lock(task_mutex_);  // a task under way is finished first
    is_running_.store(false, std::memory_order_release);
    shm::ring(bell_.bell());
    thread_.join();
  }
  // No thread any more, or never one: this one is the core now.
  drain_commands();
  scheduler_.stop();
  tell_interrupt();
  set_phase(wire::kPhaseStopped);
  detach_on_core(SessionEnd::kLost);
  tell_poller();
  publish_stats();
}

void EngineCore::on_core(const std::function<void()>& work) {
  const std::lock_guard lock(task_mutex_);
  if (!is_running_.load(std::memory_order_acquire)) throw std::logic_error("the core is not running");
  task_.store(&work, std::memory_order_release);
  shm::ring(bell_.bell());
  task_done_.acquire();
  if (task_error_) std::rethrow_exception(std::exchange(task_error_, nullptr));
}

// --- sessions --------------------------------------------------------------------------------------------------------

void EngineCore::attach(int segment_fd, const wire::Capacities& capacities, uint64_t epoch, const Pool& pool) {
  on_core([&] { attach_on_core(segment_fd, capacities, epoch, pool); });
}

void EngineCore::activate(Nanos swap_block) {
  on_core([this, swap_block] {
    if (link_ == nullptr) throw std::logic_error("no session is attached");
    if (swap_block != Nanos{0}) scheduler_.expect_swaps(swap_block);
    link_->is_active = true;
  });
}

void EngineCore::detach(SessionEnd end) {
  on_core([&] { detach_on_core(end); });
}

void EngineCore::attach_on_core(int segment_fd, const wire::Capacities& capacities, uint64_t epoch, const Pool& pool) {
  auto link = std::make_shared<Link>(segment_fd, epoch);
  if (std::memcmp(&link->mapping.capacities(), &capacities, sizeof(capacities)) != 0) {
    throw shm::ProtocolError("the segment was formatted for other capacities than the session has");
  }
  scheduler_.attach(pool, capacities);
  try {
    bell_.rebind(segment_fd, link->mapping.layout().control_bell);
  } catch (...) {
    scheduler_.detach(SessionEnd::kLost);
    throw;
  }
  link_ = std::move(link);
  set_phase(wire::kPhaseStarting);
  const std::lock_guard lock(view_mutex_);
  view_ = link_;
  fault_.clear();
}

void EngineCore::detach_on_core(SessionEnd end) {
  scheduler_.detach(end);
  bell_.unbind();
  link_.reset();
  const std::lock_guard lock(view_mutex_);
  view_.reset();
}

// --- requests --------------------------------------------------------------------------------------------------------

std::optional<Refusal> EngineCore::submit(RequestId id, std::span<const int32_t> prompt, RequestParams params) {
  auto command = std::make_unique<Command>();
  auto refusal = gate_.enter(id, prompt, std::move(params), {shm::now_ns()}, [&](std::unique_ptr<Sequence> sequence) {
    command->sequence = std::move(sequence);
    commands_.push(std::move(command));
  });
  if (!refusal) shm::ring(bell_.bell());
  commands_.free_spent();
  return refusal;
}

void EngineCore::cancel(RequestId id) {
  auto command = std::make_unique<Command>();
  command->id = id;
  commands_.push(std::move(command));
  shm::ring(bell_.bell());
  commands_.free_spent();
}

void EngineCore::reset_prefix_cache() {
  on_core([this] { scheduler_.reset_prefix_cache(); });
}

// --- the core's thread -----------------------------------------------------------------------------------------------

void EngineCore::run() {
  pthread_setname_np(pthread_self(), "twinplane-core");
  while (is_running_.load(std::memory_order_acquire)) {
    // Each source is emptied once per turn, results before steps: what they free and finish is planned with.
    bool worked = run_task();
    worked |= drain_commands();
    tell_interrupt();  // who has just come waits for no more than the substep under way
    worked |= take_results();
    worked |= send_steps();
    tell_interrupt();  // a deadline has passed
    tell_poller();
    publish_stats();
    if (link_ != nullptr) shm::beat(link_->own());
    if (worked) continue;
    if (link_ != nullptr && link_->is_active) set_phase(wire::kPhaseIdle);
    waiter_.wait([this] { return has_news(); }, shm::kWaitBoundNs);
  }
}

bool EngineCore::has_news() const {
  return !commands_.empty() || task_.load(std::memory_order_acquire) != nullptr ||
         !is_running_.load(std::memory_order_acquire) || (link_ != nullptr && link_->results.has_news());
}

bool EngineCore::run_task() {
  const std::function<void()>* const task = task_.load(std::memory_order_acquire);
  if (task == nullptr) return false;
  task_.store(nullptr, std::memory_order_relaxed);
  try {
    (*task)();
  } catch (...) {
    task_error_ = std::current_exception();
  }
  publish_stats();  // whoever waits for the task may look at once
  task_done_.release();
  return true;
}

bool EngineCore::drain_commands() {
  return commands_.drain([this](Command& command) {
    if (command.sequence != nullptr) {
      scheduler_.accept(std::move(command.sequence));
    } else {
      scheduler_.cancel(command.id);
    }
  });
}

void EngineCore::tell_interrupt() {
  if (link_ == nullptr) return;
  const uint64_t below = scheduler_.interrupted().value;
  if (below != shm::interrupted(link_->own())) shm::interrupt(link_->own(), below);
}

bool EngineCore::take_results() {
  if (link_ == nullptr || !link_->results.has_news()) return false;
  while (link_->results.has_news()) {
    const uint64_t result = link_->results.next();
    try {
      scheduler_.retire(link_->results.slot(result), {shm::now_ns()});
    } catch (const ProtocolFault& fault) {
      const std::lock_guard lock(view_mutex_);
      fault_ = fault.what();
    }
    link_->results.consume(result);
  }
  return true;
}

bool EngineCore::send_steps() {
  if (link_ == nullptr || !link_->is_active) {
    scheduler_.expire({shm::now_ns()});
    return false;
  }
  set_phase(wire::kPhasePlan);
  bool sent = false;
  while (link_->steps.has_room()) {
    const uint64_t start_ns = shm::now_ns();
    const bool has_step = scheduler_.tick(link_->steps.slot(), {start_ns});
    const uint64_t tick_ns = shm::now_ns() - start_ns;
    tick_ns_total_ += tick_ns;
    tick_ns_max_ = std::max(tick_ns_max_, tick_ns);
    if (!has_step) break;
    link_->steps.publish();
    sent = true;
  }
  return sent;
}

void EngineCore::tell_poller() {
  if (events_.flush()) event_fd_.signal();
}

void EngineCore::set_phase(wire::Phase phase) {
  if (link_ != nullptr) shm::set_phase(link_->own(), phase, link_->steps.sequence());
}

// --- looking ---------------------------------------------------------------------------------------------------------

void EngineCore::publish_stats() {
  Stats stats = stats_of(scheduler_);
  stats.tick_ns_total = tick_ns_total_;
  stats.tick_ns_max = tick_ns_max_;
  stats.missed_wakes = waiter_.missed_wakes();
  board_.publish(stats);
}

Stats EngineCore::stats() const {
  Stats stats = board_.read();
  add_queue(stats, gate_);
  return stats;
}

std::optional<PeerView> EngineCore::peer() const {
  std::shared_ptr<const Link> link;
  PeerView view{};
  {
    const std::lock_guard lock(view_mutex_);
    link = view_;
    view.fault = fault_;
  }
  if (link == nullptr) return std::nullopt;
  view.data = shm::snapshot(link->mapping.data());
  view.control = shm::snapshot(link->mapping.control());
  return view;
}

}  // namespace twinplane::core
