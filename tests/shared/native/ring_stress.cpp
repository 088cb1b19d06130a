// Stress of the protocol's native half for the sanitizers: rings both ways, bells, a bell whose memory is swapped under
// its ringers, heartbeat. Prints what it did; aborts on the first thing that is wrong.
//   ring_stress [messages per scenario]
//
// ThreadSanitizer follows addresses, so it can judge an ordering only if both ends use one mapping; in service each
// plane has its own. Both ways are run.
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>

#include "shared/csrc/plane_state.hpp"
#include "shared/csrc/ring.hpp"
#include "shared/csrc/stable_bell.hpp"

namespace shm = twinplane::shm;
namespace wire = twinplane::wire;

// The sanitizer takes mmap for an ordinary write into the page, which would race with the ringers. StableBell relies on
// the kernel replacing the page under the address space's lock instead.
extern "C" const char* __tsan_default_suppressions() { return "race:twinplane::shm::StableBell::place\n"; }

namespace {

constexpr wire::Capacities kCapacities = {4, 8, 64, 16, 4, 16, 16, 0, 0};
constexpr uint64_t kEpoch = 1;
// Far longer than any pause: news that waits so long was missed.
constexpr uint64_t kLongBoundNs = 20 * shm::kNsPerSecond;
constexpr size_t kWords = 16;  // of a slot, each holding its sequence number

void check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::abort();
}

int make_segment() {
  const int fd = memfd_create("ring_stress", MFD_CLOEXEC);
  check(fd >= 0, "memfd_create");
  check(ftruncate(fd, static_cast<off_t>(wire::SegmentLayout(kCapacities).bytes)) == 0, "ftruncate");
  shm::format_segment(fd, kCapacities, kEpoch);
  return fd;
}

class Pauses {
 public:
  explicit Pauses(uint32_t seed) : random_(seed) {}
  void maybe() {
    if (random_() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 50));
  }

 private:
  std::minstd_rand random_;
};

// Sleeps now and then between two steps of the protocol: interleavings that would take days to meet by chance.
void dawdle(shm::Point) {
  thread_local Pauses pauses(static_cast<uint32_t>(std::hash<std::thread::id>{}(std::this_thread::get_id())) | 1);
  pauses.maybe();
}

void fill(std::byte* slot, uint64_t sequence) {
  for (size_t i = 0; i < kWords; ++i) reinterpret_cast<uint64_t*>(slot)[i] = sequence;
}

void verify(const std::byte* slot, uint64_t sequence) {
  for (size_t i = 0; i < kWords; ++i) {
    check(reinterpret_cast<const uint64_t*>(slot)[i] == sequence, "a slot's contents");
  }
}

// Waits for `ready`; running into the bound is a lost wake-up.
template <typename Ready>
void wait_for(shm::BellWaiter& waiter, Ready ready) {
  for (shm::Wake wake = shm::Wake::kRung; wake != shm::Wake::kNews;) {
    wake = waiter.wait(ready, kLongBoundNs);
    check(wake != shm::Wake::kTimedOut, "no lost wake-up");
  }
}

// One plane: sends `count` slots and receives as many, at most `ahead` of them unanswered.
void exchange(shm::RingWriter out, shm::RingReader in, wire::Bell& bell, uint64_t count, uint64_t ahead,
              uint32_t seed) {
  shm::BellWaiter waiter(bell, kLongBoundNs);
  Pauses pauses(seed);
  uint64_t sent = 0, received = 0;
  // The peer may be further than we are: `received` can be above `sent`.
  const auto may_send = [&] { return sent < count && sent < received + ahead && out.has_room(); };
  while (sent < count || received < count) {
    while (may_send()) {
      fill(out.slot(), sent++);
      pauses.maybe();
      out.publish();
    }
    if (sent < count || received < count) wait_for(waiter, [&] { return in.has_news() || may_send(); });
    while (in.has_news()) {
      const uint64_t sequence = in.next();
      check(sequence == received, "order");
      verify(in.slot(sequence), sequence);
      pauses.maybe();
      in.consume(sequence);
      ++received;
    }
  }
  check(waiter.missed_wakes() == 0, "missed_wakes is 0");
}

void rings_in_one_mapping(uint64_t count, uint64_t ahead) {
  const int fd = make_segment();
  const wire::SegmentLayout layout(kCapacities);
  const shm::Mapping map(fd, layout.bytes);
  close(fd);
  auto& control = map.as<wire::PlaneState>(layout.control);
  auto& data = map.as<wire::PlaneState>(layout.data);
  auto& control_bell = map.as<wire::Bell>(layout.control_bell);
  auto& data_bell = map.as<wire::Bell>(layout.data_bell);
  const shm::Slots steps{map.at(layout.steps), wire::StepSlotLayout(kCapacities).bytes, kCapacities.ring_depth};
  const shm::Slots results{map.at(layout.results), wire::ResultSlotLayout(kCapacities).bytes, kCapacities.ring_depth};
  std::thread peer([&] {
    exchange({results, data.published, control.consumed, control_bell},
             {steps, control.published, data.consumed, control_bell}, data_bell, count, ahead, 1);
  });
  exchange({steps, control.published, data.consumed, data_bell}, {results, data.published, control.consumed, data_bell},
           control_bell, count, ahead, 2);
  peer.join();
}

void rings_in_two_mappings(uint64_t count, uint64_t ahead) {
  const int fd = make_segment();
  std::thread peer([&] {
    const shm::Session data(fd, kEpoch, shm::Plane::kData);
    exchange(shm::result_writer(data), shm::step_reader(data), data.data_bell(), count, ahead, 3);
  });
  const shm::Session control(fd, kEpoch, shm::Plane::kControl);
  exchange(shm::step_writer(control), shm::result_reader(control), control.control_bell(), count, ahead, 4);
  peer.join();
  close(fd);
}

// One way only: the writer is woken by nothing but [P3], the reader's finding that it made room in a full ring.
void flood(uint64_t count) {
  const int fd = make_segment();
  const shm::Session control(fd, kEpoch, shm::Plane::kControl), data(fd, kEpoch, shm::Plane::kData);
  close(fd);
  std::thread reader([&] {
    shm::RingReader steps = shm::step_reader(data);
    shm::BellWaiter waiter(data.data_bell(), kLongBoundNs);
    for (uint64_t expected = 0; expected < count; ++expected) {
      wait_for(waiter, [&] { return steps.has_news(); });
      check(steps.next() == expected, "order");
      verify(steps.slot(expected), expected);
      steps.consume(expected);
    }
  });
  shm::RingWriter steps = shm::step_writer(control);
  shm::BellWaiter waiter(control.control_bell(), kLongBoundNs);
  for (uint64_t i = 0; i < count; ++i) {
    wait_for(waiter, [&] { return steps.has_room(); });
    fill(steps.slot(), i);
    steps.publish();
  }
  reader.join();
}

// Two producers ring a bell whose owner keeps moving it between anonymous memory and fresh segments. Each producer
// waits until its item was taken, so no later ring can hide a lost one.
void stable_bell_under_ringers(uint64_t count) {
  shm::StableBell stable;
  wire::Bell* const address = &stable.bell();
  std::array<std::atomic<uint64_t>, 2> offered{}, taken{};
  const auto produce = [&](size_t who) {
    Pauses pauses(static_cast<uint32_t>(who));
    for (uint64_t i = 1; i <= count; ++i) {
      offered[who].store(i, std::memory_order_release);
      shm::ring(*address);
      while (taken[who].load(std::memory_order_acquire) != i) std::this_thread::yield();
      pauses.maybe();
    }
  };
  std::thread first(produce, 0), second(produce, 1);

  shm::BellWaiter waiter(stable.bell(), kLongBoundNs);
  const auto pending = [&](size_t who) {
    return offered[who].load(std::memory_order_acquire) != taken[who].load(std::memory_order_relaxed);
  };
  for (uint64_t round = 0; taken[0] < count || taken[1] < count; ++round) {
    if (round % 16 == 0) {
      const int fd = make_segment();
      stable.rebind(fd, wire::SegmentLayout(kCapacities).control_bell);
      close(fd);
    } else if (round % 16 == 8) {
      stable.unbind();
    }
    check(&stable.bell() == address, "the bell's address never changes");
    wait_for(waiter, [&] { return pending(0) || pending(1); });
    for (size_t who = 0; who < 2; ++who) {
      if (pending(who)) taken[who].store(offered[who].load(std::memory_order_acquire), std::memory_order_release);
    }
  }
  first.join();
  second.join();
}

void heartbeat_and_snapshots() {
  const int fd = make_segment();
  const shm::Session session(fd, kEpoch, shm::Plane::kData);
  close(fd);
  for (int round = 0; round < 20; ++round) {
    const shm::Heartbeat heartbeat(session.data());
    for (uint64_t step = 0; step < 200; ++step) {
      shm::set_phase(session.data(), wire::kPhaseForward, step);
      const shm::PlaneSnapshot seen = shm::snapshot(session.data());
      check(seen.phase == wire::kPhaseForward && seen.phase_step == step, "the phase just set");
      check(seen.heartbeat_ns != 0 && seen.heartbeat_ns <= shm::now_ns(), "a heartbeat of the past");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
  for (const shm::PointHook hook : {shm::PointHook{nullptr}, shm::PointHook{dawdle}}) {
    shm::point_hook.store(hook);
    const uint64_t messages = hook == nullptr ? count : count / 4;
    for (const uint64_t ahead : {1, 4}) {
      rings_in_one_mapping(messages, ahead);
      rings_in_two_mappings(messages, ahead);
    }
    flood(10 * messages);
    stable_bell_under_ringers(messages);
  }
  heartbeat_and_snapshots();
  std::printf("ok: %llu messages per scenario\n", static_cast<unsigned long long>(count));
}
