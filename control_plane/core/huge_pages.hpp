// Memory in huge pages.
//
// A tick looks at some bytes of every running request, and at some of the prefix tree. In pages of 4 KiB those lie on
// more pages than the processor remembers the addresses of, and each look then waits for the page tables as well; in
// pages of 2 MiB they do not. Where the kernel gives none (it is asked by madvise), this is memory like any other.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <vector>

namespace twinplane::core {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// Zeroed, aligned to a huge page, and untouched so far. Throws std::bad_alloc.
void* map_huge_pages(size_t bytes);
void unmap_huge_pages(void* at, size_t bytes) noexcept;

// For containers that are made once: those as large as a huge page get their own, the others come from the heap.
template <typename T>
struct HugePageAllocator {
  using value_type = T;

  HugePageAllocator() = default;
  template <typename U>
  HugePageAllocator(const HugePageAllocator<U>&) {}

  T* allocate(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes < kHugePageBytes) return static_cast<T*>(::operator new(bytes, std::align_val_t{alignof(T)}));
    return static_cast<T*>(map_huge_pages(bytes));
  }
  void deallocate(T* at, size_t count) noexcept {
    const size_t bytes = count * sizeof(T);
    if (bytes < kHugePageBytes) return ::operator delete(at, bytes, std::align_val_t{alignof(T)});
    unmap_huge_pages(at, bytes);
  }

  friend bool operator==(const HugePageAllocator&, const HugePageAllocator&) { return true; }
};

template <typename T>
using HugePageVector = std::vector<T, HugePageAllocator<T>>;

template <typename T>
struct HugePageDelete {
  size_t count;
  void operator()(T* at) const noexcept { HugePageAllocator<T>().deallocate(at, count); }
};

// An array whose elements are left as they come, so that its pages are taken when they are first written.
template <typename T>
using HugePageArray = std::unique_ptr<T[], HugePageDelete<T>>;

template <typename T>
HugePageArray<T> make_huge_page_array(size_t count) {
  return HugePageArray<T>(HugePageAllocator<T>().allocate(count), HugePageDelete<T>{count});
}

}  // namespace twinplane::core
