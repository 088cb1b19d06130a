// Round trips between two processes without Python in between: what the rings cost, and, as the yardstick on the
// same machine at the same moment, what a bare futex costs. Used by benchmarks/ring.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "shared/csrc/ring.hpp"

namespace twinplane::shm {

inline constexpr uint64_t kPeerPatienceNs = 10 * kNsPerSecond;

class Patience {
 public:
  void check() const {
    if (now_ns() > deadline_) throw std::runtime_error("the other process has not answered for 10 s");
  }

 private:
  uint64_t deadline_ = now_ns() + kPeerPatienceNs;
};

template <typename Ready>
void wait_until(BellWaiter& waiter, Ready ready) {
  for (const Patience patience; waiter.wait(ready, kWaitBoundNs) != Wake::kNews;) patience.check();
}

// Puts `bytes` into a slot and sends it, waiting for a free one.
inline void send(RingWriter& out, BellWaiter& waiter, uint64_t bytes, uint64_t value) {
  wait_until(waiter, [&] { return out.has_room(); });
  std::memset(out.slot(), static_cast<int>(value & 0xff), std::min(bytes, out.slot_bytes()));
  out.publish();
}

// Takes the next slot, reads `bytes` of it, and gives it back.
inline void receive(RingReader& in, BellWaiter& waiter, uint64_t bytes, uint64_t value) {
  wait_until(waiter, [&] { return in.has_news(); });
  const uint64_t sequence = in.next();
  const std::byte* slot = in.slot(sequence);
  const auto expected = static_cast<std::byte>(value & 0xff);
  for (uint64_t i = 0; i < std::min(bytes, in.slot_bytes()); i += wire::kCacheLine) {
    if (slot[i] != expected) throw std::runtime_error("a slot does not hold what was sent");
  }
  in.consume(sequence);
}

// Control plane's side: nanoseconds of each of `count` exchanges of one step against one result of `bytes` each.
inline std::vector<uint64_t> measure_ring(int fd, uint64_t epoch, uint64_t count, uint64_t bytes) {
  const Session session(fd, epoch, Plane::kControl);
  BellWaiter waiter(session.control_bell());
  RingWriter steps = step_writer(session);
  RingReader results = result_reader(session);
  std::vector<uint64_t> ns;
  ns.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t start = now_ns();
    send(steps, waiter, bytes, i);
    receive(results, waiter, bytes, i);
    ns.push_back(now_ns() - start);
  }
  return ns;
}

// Data plane's side of measure_ring().
inline void answer_ring(int fd, uint64_t epoch, uint64_t count, uint64_t bytes) {
  const Session session(fd, epoch, Plane::kData);
  BellWaiter waiter(session.data_bell());
  RingReader steps = step_reader(session);
  RingWriter results = result_writer(session);
  for (uint64_t i = 0; i < count; ++i) {
    receive(steps, waiter, bytes, i);
    send(results, waiter, bytes, i);
  }
}

// Two words, a cache line each, in the first page of a file; each process writes one and sleeps on the other.
struct PingPong {
  alignas(wire::kCacheLine) uint32_t ping;
  alignas(wire::kCacheLine) uint32_t pong;
};

inline void raise_and_wake(uint32_t& word, uint32_t value) {
  store(word, value, std::memory_order_release);
  futex_wake(word);
}

inline void wait_for_value(const uint32_t& word, uint32_t value) {
  const Patience patience;
  for (uint32_t seen; (seen = load(word, std::memory_order_acquire)) != value; patience.check()) {
    futex_wait(word, seen, kWaitBoundNs);
  }
}

inline std::vector<uint64_t> measure_futex(int fd, uint32_t count) {
  const Mapping page(fd, wire::kPage);
  auto& words = page.as<PingPong>(0);
  std::vector<uint64_t> ns;
  ns.reserve(count);
  for (uint32_t i = 1; i <= count; ++i) {
    const uint64_t start = now_ns();
    raise_and_wake(words.ping, i);
    wait_for_value(words.pong, i);
    ns.push_back(now_ns() - start);
  }
  return ns;
}

// The other side of measure_futex().
inline void answer_futex(int fd, uint32_t count) {
  const Mapping page(fd, wire::kPage);
  auto& words = page.as<PingPong>(0);
  for (uint32_t i = 1; i <= count; ++i) {
    wait_for_value(words.ping, i);
    raise_and_wake(words.pong, i);
  }
}

}  // namespace twinplane::shm
