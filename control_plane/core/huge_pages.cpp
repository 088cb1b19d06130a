#include "control_plane/core/huge_pages.hpp"

#include <sys/mman.h>

#include <array>
#include <bit>
#include <cstdint>
#include <mutex>

namespace twinplane::core {
namespace {

constexpr size_t kLineBytes = 64;

constexpr size_t rounded_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Pieces come in sizes of so many cache lines: four sizes to each doubling, so that less than a quarter is wasted, and
// all of them odd. Were they even, the first lines of all requests, which are the ones every tick looks at, would
// share a few sets of the caches.
constexpr size_t lines_of(size_t bytes) {
  const size_t lines = (bytes + kLineBytes - 1) / kLineBytes;
  const size_t unit = std::bit_ceil(lines + 1) / 8;
  return (unit <= 1 ? lines : rounded_up(lines, unit)) | 1;
}

// Which size that is, counted from the shortest.
constexpr size_t class_of(size_t lines) {
  const auto doublings = static_cast<size_t>(std::bit_width(lines));
  return doublings <= 3 ? lines : 4 * doublings + (lines >> (doublings - 3)) % 4;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif

// Free pieces by size, each linked to the next one of its size; and the rest of the last huge page taken.
class Heap {
 public:
  void* allocate(size_t bytes) {
    const size_t lines = lines_of(bytes);
    const std::lock_guard lock(mutex_);
    Piece*& free = free_[class_of(lines)];
    if (free == nullptr) return cut(lines * kLineBytes);
    Piece* const piece = free;
    free = piece->next;
    return piece;
  }

  void free(void* at, size_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    Piece*& free = free_[class_of(lines_of(bytes))];
    free = new (at) Piece{free};
  }

 private:
  struct Piece {
    Piece* next;
  };

  void* cut(size_t bytes) {
    if (left_ < bytes) {
      rest_ = static_cast<std::byte*>(map_huge_pages(kHugePageBytes));
      left_ = kHugePageBytes;
    }
    std::byte* const piece = rest_;
    rest_ += bytes;
    left_ -= bytes;
    return piece;
  }

  std::mutex mutex_;
  std::array<Piece*, class_of(lines_of(request_heap::kLongestPiece)) + 1> free_{};
  std::byte* rest_ = nullptr;
  size_t left_ = 0;
};

// Never destroyed: requests may outlive whatever else ends with the process.
Heap& heap() {
  static Heap* const heap = new Heap;
  return *heap;
}

}  // namespace

void* map_huge_pages(size_t bytes) {
  // The kernel aligns to its own page: take a huge page more, and give back what lies before and behind.
  const size_t length = rounded_up(bytes, kHugePageBytes);
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

void unmap_huge_pages(void* at, size_t bytes) noexcept { munmap(at, rounded_up(bytes, kHugePageBytes)); }

namespace request_heap {

void* allocate(size_t bytes) {
  if (kIsSanitized || bytes > kLongestPiece) return ::operator new(bytes, std::align_val_t{kLineBytes});
  return heap().allocate(bytes);
}

void free(void* at, size_t bytes) noexcept {
  if (kIsSanitized || bytes > kLongestPiece) return ::operator delete(at, bytes, std::align_val_t{kLineBytes});
  heap().free(at, bytes);
}

}  // namespace request_heap
}  // namespace twinplane::core
