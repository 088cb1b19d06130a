// The heap for requests: one piece of memory for each, in huge pages.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <mutex>

namespace twinplane::core {

// Free pieces by size, and the rest of the huge page from which new ones are cut. Pieces stay what they are: memory is
// kept for the next request of that size, and given back at the end. So it is what the most requests of each size at
// once have needed. Any thread.
class RequestHeap {
 public:
  static constexpr size_t kLineBytes = 64;
  static constexpr size_t kLongestPiece = size_t{64} << 10;

  RequestHeap() = default;
  RequestHeap(const RequestHeap&) = delete;
  RequestHeap& operator=(const RequestHeap&) = delete;
  ~RequestHeap();

  // At most kLongestPiece, aligned to a cache line; its content is whatever was there. Throws std::bad_alloc.
  void* allocate(size_t bytes);
  // `bytes` as it was allocated.
  void free(void* at, size_t bytes) noexcept;

  // Taken from the kernel.
  size_t mapped_bytes() const;

 private:
  struct Piece {
    Piece* next;
  };

  // Pieces come in sizes of so many cache lines: four sizes to each doubling, so that about a quarter is wasted at
  // most, and all of them odd. Were they even, the first lines of all requests, which are the ones every tick looks at,
  // would share a few sets of the caches.
  static constexpr size_t lines_of(size_t bytes) {
    const size_t lines = (bytes + kLineBytes - 1) / kLineBytes;
    const size_t unit = std::bit_ceil(lines + 1) / 8;
    return (unit <= 1 ? lines : (lines + unit - 1) / unit * unit) | 1;
  }

  // Which size that is, counted from the shortest.
  static constexpr size_t class_of(size_t lines) {
    const auto doublings = static_cast<size_t>(std::bit_width(lines));
    return doublings <= 3 ? lines : 4 * doublings + (lines >> (doublings - 3)) % 4;
  }

  void* cut(size_t bytes);

  mutable std::mutex mutex_;
  std::array<Piece*, 48> free_{};  // by class
  Piece* pages_ = nullptr;         // huge pages taken, linked by their first bytes
  size_t num_pages_ = 0;
  std::byte* rest_ = nullptr;
  size_t left_ = 0;
};

// From the process's heap for requests. What is longer than kLongestPiece comes from the general heap, because most of
// it may never be touched; and under a sanitizer everything does, for it could not tell a piece that is used after it
// was freed.
void* allocate_request(size_t bytes);
void free_request(void* at, size_t bytes) noexcept;

}  // namespace twinplane::core
