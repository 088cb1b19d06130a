// The engine's thread under fire, for ThreadSanitizer: producers submit and cancel, a poller reads, data planes come
// and go, and at the end the core is stopped. Every request must end exactly once, with the tokens it gets alone.
// Usage: engine_stress SECONDS
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "control_plane/core/engine_core.hpp"
#include "tests/core/native/fake_device.hpp"

namespace twinplane::core::testing {
namespace {

constexpr int32_t kEos = 3;
constexpr uint32_t kProducers = 3;

Config stress_config() {
  Config config;
  config.max_rows = 8;
  config.max_step_tokens = {64};
  config.max_chunk_tokens = {16};
  config.max_waiting_requests = 60;
  config.max_model_len = {96};
  config.max_substeps = 4;
  return config;
}

// A session: a segment in memory, and the thread that serves it until it is told to die.
class DataPlane {
 public:
  DataPlane(const Config& config, uint64_t epoch, const Pool& pool)
      : capacities_(capacities_for(config, pool)), fd_(memfd_create("engine-stress", 0)), device_(pool, capacities_) {
    REQUIRE(fd_ >= 0 && ftruncate(fd_, static_cast<off_t>(wire::SegmentLayout(capacities_).bytes)) == 0, "no memory");
    shm::format_segment(fd_, capacities_, epoch);
    session_ = std::make_unique<shm::Session>(fd_, epoch, shm::Plane::kData);
    thread_ = std::thread([this] { serve(); });
  }
  ~DataPlane() {
    kill();
    close(fd_);
  }

  int fd() const { return fd_; }
  const wire::Capacities& capacities() const { return capacities_; }

  void kill() {
    stop_.store(true);
    shm::ring(session_->data_bell());
    if (thread_.joinable()) thread_.join();
  }

 private:
  void serve() {
    shm::RingReader steps = shm::step_reader(*session_);
    shm::RingWriter results = shm::result_writer(*session_);
    shm::BellWaiter waiter(session_->data_bell());
    while (!stop_.load()) {
      waiter.wait([&] { return (steps.has_news() && results.has_room()) || stop_.load(); }, shm::kWaitBoundNs);
      while (steps.has_news() && results.has_room() && !stop_.load()) {
        const uint64_t step = steps.next();
        bool is_last;
        do {
          waiter.wait([&] { return results.has_room() || stop_.load(); }, shm::kWaitBoundNs);
          if (stop_.load()) return;
          if (!results.has_room()) {
            is_last = false;
            continue;
          }
          is_last = device_.run(steps.slot(step), results.slot(), shm::interrupted(session_->control()));
          results.publish();
        } while (!is_last);
        steps.consume(step);
      }
    }
  }

  wire::Capacities capacities_;
  int fd_;
  FakeDevice device_;
  std::unique_ptr<shm::Session> session_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// What was accepted, and what came of it. One lock: the test may be slow where the engine may not.
class Ledger {
 public:
  void accept(uint64_t id, std::vector<int32_t> output) {
    const std::lock_guard lock(mutex_);
    requests_[id].output = std::move(output);
  }
  void withdraw(uint64_t id) {
    const std::lock_guard lock(mutex_);
    requests_.erase(id);
  }
  void record(const Sequence& s, uint32_t from, uint32_t to, bool is_last) {
    const std::lock_guard lock(mutex_);
    Request& request = requests_.at(s.id.value);
    REQUIRE(request.finish == FinishReason::kNone, "request %lu ended twice", s.id.value);
    const int32_t* const output = s.tokens + s.prompt_tokens.value;
    request.seen.insert(request.seen.end(), output + from, output + to);
    REQUIRE(std::equal(request.seen.begin(), request.seen.end(), request.output.begin()), "request %lu", s.id.value);
    if (is_last) request.finish = s.finish;
    ended_ += is_last;
  }
  bool all_ended() {
    const std::lock_guard lock(mutex_);
    return ended_ == requests_.size();
  }
  void verify() {
    std::map<FinishReason, size_t> finished;
    for (const auto& [id, request] : requests_) {
      ++finished[request.finish];
      if (request.finish == FinishReason::kEos || request.finish == FinishReason::kLength) {
        REQUIRE(request.seen == request.output, "request %lu is incomplete", id);
      }
    }
    REQUIRE(finished[FinishReason::kNone] == 0, "%zu requests never ended", finished[FinishReason::kNone]);
    for (const auto& [reason, count] : finished) std::printf("finish %d: %zu\n", static_cast<int>(reason), count);
  }

 private:
  struct Request {
    std::vector<int32_t> output;
    std::vector<int32_t> seen;
    FinishReason finish = FinishReason::kNone;
  };
  std::mutex mutex_;
  std::map<uint64_t, Request> requests_;
  size_t ended_ = 0;
};

// In a lull nobody waits most of the time, and steps have several substeps, until somebody comes.
void produce(EngineCore& core, Ledger& ledger, uint64_t producer, const std::atomic<bool>& stop,
             const std::atomic<bool>& is_lull) {
  std::mt19937_64 dice(producer);
  uint64_t count = 0;
  while (!stop.load()) {
    const uint64_t id = producer * 1'000'000 + count++;
    std::vector<int32_t> prompt(1 + dice() % 30);
    for (int32_t& token : prompt) token = static_cast<int32_t>(dice() % kVocab);
    RequestParams params;
    params.max_tokens = {static_cast<uint32_t>(1 + dice() % 60)};
    params.eos_token_ids = {kEos};
    params.logprobs = dice() % 2 == 0;
    if (dice() % 20 == 0) params.deadline = {shm::now_ns() + dice() % 5'000'000};
    ledger.accept(id, expected_output(prompt, params.max_tokens.value, kEos));
    if (core.submit({id}, prompt, std::move(params))) {
      ledger.withdraw(id);
      std::this_thread::yield();
    }
    if (dice() % 3 == 0) core.cancel({producer * 1'000'000 + dice() % count});
    if (dice() % 50 == 0) REQUIRE(core.stats().running <= stress_config().max_rows, "too many running");
    if (dice() % 50 == 0) core.peer();
    if (is_lull.load()) std::this_thread::sleep_for(std::chrono::microseconds(dice() % 20'000));
  }
}

void read_events(EngineCore& core, Ledger& ledger, const std::atomic<bool>& stop) {
  while (!stop.load()) {
    pollfd readable{.fd = core.event_fd(), .events = POLLIN, .revents = 0};
    poll(&readable, 1, 20);
    core.poll(
        [&](const Sequence& s, uint32_t from, uint32_t to, bool is_last) { ledger.record(s, from, to, is_last); });
  }
}

void stress(int seconds) {
  const Config config = stress_config();
  EngineCore core(config);
  Ledger ledger;
  core.start();
  std::atomic<bool> stop{false}, stop_reading{false}, is_lull{false};
  std::vector<std::thread> producers;
  std::thread reader([&] { read_events(core, ledger, stop_reading); });
  const uint64_t end_ns = shm::now_ns() + static_cast<uint64_t>(seconds) * shm::kNsPerSecond;
  for (uint64_t epoch = 1; shm::now_ns() < end_ns; ++epoch) {
    const Pool pool{{static_cast<uint32_t>(20 + epoch % 7 * 5)}, {4}};
    DataPlane plane(config, epoch, pool);
    core.attach(plane.fd(), plane.capacities(), epoch, pool);
    core.activate(Nanos{0});
    for (uint64_t i = producers.size(); i < kProducers; ++i) {
      producers.emplace_back([&, i] { produce(core, ledger, i, stop, is_lull); });
    }
    is_lull.store(epoch % 4 > 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    plane.kill();
    core.detach(SessionEnd::kLost);
  }
  const Pool pool{{40}, {4}};
  DataPlane plane(config, 1'000'000, pool);
  core.attach(plane.fd(), plane.capacities(), 1'000'000, pool);
  core.activate(Nanos{0});
  is_lull.store(true);
  const auto several_substeps = [&] {
    const Stats stats = core.stats();
    return stats.counters.results_taken > stats.counters.steps_retired && stats.counters.steps_interrupted != 0;
  };
  // A busy machine may have had nothing but crowds so far.
  const uint64_t patience_ns = shm::now_ns() + 30 * shm::kNsPerSecond;
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  } while (!several_substeps() && shm::now_ns() < patience_ns);
  const Stats stats = core.stats();
  std::printf("steps %lu, results %lu, interrupted %lu\n", stats.counters.steps_retired, stats.counters.results_taken,
              stats.counters.steps_interrupted);
  REQUIRE(several_substeps(), "no step had several substeps");
  core.stop();  // with producers still at it
  stop.store(true);
  for (std::thread& producer : producers) producer.join();
  while (!ledger.all_ended()) std::this_thread::yield();
  stop_reading.store(true);
  reader.join();
  ledger.verify();
}

}  // namespace
}  // namespace twinplane::core::testing

int main(int argc, char** argv) { twinplane::core::testing::stress(argc > 1 ? std::atoi(argv[1]) : 5); }
