// Contiguous memory in power-of-two pieces (Knowlton, "A fast storage allocator", CACM 1965): a piece is halved until
// it fits, and two free halves become whole again. What Orca is taken to allocate from (arXiv 2309.06180, section 6.1).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace twinplane::simulator {

class BuddyAllocator {
 public:
  // `size` units; need not be a power of two: the arena is cut into the fewest aligned powers of two.
  explicit BuddyAllocator(uint32_t size);

  // The lowest address of a piece of at least `size` units (>= 1), rounded up to a power of two; nullopt if there is
  // none. Of the pieces that are large enough, the smallest is cut.
  std::optional<uint32_t> allocate(uint32_t size);

  // `address` must come from allocate().
  void release(uint32_t address);

  uint32_t size() const { return size_; }
  uint32_t largest() const { return largest_; }  // piece of an empty arena
  uint32_t allocated() const { return allocated_; }

 private:
  uint32_t size_;
  uint32_t largest_;
  uint32_t allocated_ = 0;
  std::vector<std::set<uint32_t>> free_;  // by order: addresses of free pieces of 2^order units
  std::map<uint32_t, uint32_t> taken_;    // address -> order
};

}  // namespace twinplane::simulator
