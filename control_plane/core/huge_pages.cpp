#include "control_plane/core/huge_pages.hpp"

#include <sys/mman.h>

#include <cstdint>

namespace twinplane::core {
namespace {

constexpr size_t length_of(size_t bytes) { return (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes; }

}  // namespace

void* map_huge_pages(size_t bytes) {
  // The kernel aligns to its own page: take a huge page more, and give back what lies before and behind.
  const size_t length = length_of(bytes);
  void* const mapped =
      mmap(nullptr, length + kHugePageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<std::byte*>(mapped);
  const size_t before = -reinterpret_cast<uintptr_t>(begin) % kHugePageBytes;
  if (before != 0) munmap(begin, before);
  munmap(begin + before + length, kHugePageBytes - before);
  madvise(begin + before, length, MADV_HUGEPAGE);  // where there are none, it is right to go on without
  return begin + before;
}

void unmap_huge_pages(void* at, size_t bytes) noexcept { munmap(at, length_of(bytes)); }

}  // namespace twinplane::core
