// futex(2) on a word that several processes map. Never FUTEX_PRIVATE_FLAG: a private futex is keyed by address space,
// and a wake from the other process would find nobody.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <ctime>
#include <system_error>

#include "shared/csrc/clock.hpp"

namespace twinplane::shm {

enum class FutexWait {
  kWoken,        // a wake, or a spurious return: indistinguishable, and it does not matter (INV-1)
  kChanged,      // the word was not `expected`; did not sleep
  kTimedOut,     // slept the whole time
  kInterrupted,  // a signal handler ran
};

// Sleeps while `word == expected`, at most `timeout_ns`. The kernel compares and enqueues in one step, behind a full
// barrier. Whatever it returns, the caller looks at the truth again.
inline FutexWait futex_wait(const uint32_t& word, uint32_t expected, uint64_t timeout_ns) {
  timespec timeout{};  // relative, measured on CLOCK_MONOTONIC
  timeout.tv_sec = static_cast<time_t>(timeout_ns / kNsPerSecond);
  timeout.tv_nsec = static_cast<long>(timeout_ns % kNsPerSecond);
  if (syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0) == 0) return FutexWait::kWoken;
  switch (errno) {
    case EAGAIN:
      return FutexWait::kChanged;
    case ETIMEDOUT:
      return FutexWait::kTimedOut;
    case EINTR:
      return FutexWait::kInterrupted;
    default:  // EFAULT, EINVAL, ENOSYS: no retry can help
      throw std::system_error(errno, std::generic_category(), "futex wait");
  }
}

// Wakes at most one sleeper. Errors are ignored: the only possible ones mean that nobody can be asleep there.
inline void futex_wake(const uint32_t& word) { syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0); }

}  // namespace twinplane::shm
