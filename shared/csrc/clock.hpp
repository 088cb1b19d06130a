// The one clock both planes share: CLOCK_MONOTONIC counts from boot for every process of the machine, whatever its
// PID namespace, so a time stamp of one plane can be subtracted from a reading of the other.
#pragma once

#include <cstdint>
#include <ctime>

namespace twinplane::shm {

inline constexpr uint64_t kNsPerSecond = 1'000'000'000;

// Nanoseconds of CLOCK_MONOTONIC; a vDSO call, no system call.
inline uint64_t now_ns() {
  timespec ts{};
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return static_cast<uint64_t>(ts.tv_sec) * kNsPerSecond + static_cast<uint64_t>(ts.tv_nsec);
}

}  // namespace twinplane::shm
