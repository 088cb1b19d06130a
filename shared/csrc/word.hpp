// Atomic access to words of the mapping. The wire structs are plain data; std::atomic_ref gives one access an ordering.
// Every access to a word that both planes can see goes through here; slot contents do not need to, they are ordered
// by the ring's counters.
#pragma once

#include <atomic>
#include <cstdint>

namespace twinplane::shm {

// Lock-free also means address-free: the two planes map the word at different addresses.
static_assert(std::atomic_ref<uint32_t>::is_always_lock_free && std::atomic_ref<uint64_t>::is_always_lock_free);

template <typename T>
T load(const T& word, std::memory_order order) {
  // The cast only satisfies C++20, which has no atomic_ref<const T>: a load does not write, not even on a page that
  // is mapped read-only.
  return std::atomic_ref<T>(const_cast<T&>(word)).load(order);
}

template <typename T>
void store(T& word, T value, std::memory_order order) {
  std::atomic_ref<T>(word).store(value, order);
}

}  // namespace twinplane::shm
