#include "control_plane/core/request_heap.hpp"

#include <cassert>
#include <new>
#include <tuple>
#include <utility>

#include "control_plane/core/huge_pages.hpp"

namespace twinplane::core {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif

bool is_general(size_t bytes) { return kIsSanitized || bytes > RequestHeap::kLongestPiece; }

// Never destroyed: requests may outlive whatever else ends with the process.
RequestHeap& heap() {
  static RequestHeap* const heap = new RequestHeap;
  return *heap;
}

}  // namespace

RequestHeap::~RequestHeap() {
  while (pages_ != nullptr) unmap_huge_pages(std::exchange(pages_, pages_->next), kHugePageBytes);
}

void* RequestHeap::allocate(size_t bytes) {
  static_assert(class_of(lines_of(kLongestPiece)) < std::tuple_size_v<decltype(free_)>);
  assert(bytes <= kLongestPiece);
  const size_t lines = lines_of(bytes);
  const std::lock_guard lock(mutex_);
  Piece*& first = free_[class_of(lines)];
  if (first == nullptr) return cut(lines * kLineBytes);
  return std::exchange(first, first->next);
}

void RequestHeap::free(void* at, size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  Piece*& first = free_[class_of(lines_of(bytes))];
  first = new (at) Piece{first};
}

size_t RequestHeap::mapped_bytes() const {
  const std::lock_guard lock(mutex_);
  return num_pages_ * kHugePageBytes;
}

// What is left of the last huge page, if it is too little, is not used any more.
void* RequestHeap::cut(size_t bytes) {
  if (left_ < bytes) {
    rest_ = static_cast<std::byte*>(map_huge_pages(kHugePageBytes));
    pages_ = new (rest_) Piece{pages_};
    ++num_pages_;
    rest_ += kLineBytes;
    left_ = kHugePageBytes - kLineBytes;
  }
  std::byte* const piece = rest_;
  rest_ += bytes;
  left_ -= bytes;
  return piece;
}

void* allocate_request(size_t bytes) {
  if (is_general(bytes)) return ::operator new(bytes, std::align_val_t{RequestHeap::kLineBytes});
  return heap().allocate(bytes);
}

void free_request(void* at, size_t bytes) noexcept {
  if (is_general(bytes)) return ::operator delete(at, bytes, std::align_val_t{RequestHeap::kLineBytes});
  heap().free(at, bytes);
}

}  // namespace twinplane::core
