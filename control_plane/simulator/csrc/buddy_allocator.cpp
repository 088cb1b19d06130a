#include "control_plane/simulator/csrc/buddy_allocator.hpp"

#include <bit>
#include <stdexcept>

namespace twinplane::simulator {

BuddyAllocator::BuddyAllocator(uint32_t size) : size_(size), largest_(std::bit_floor(size)), free_(32) {
  if (size == 0) throw std::invalid_argument("an arena has at least one unit");
  // Descending, so each piece begins at a multiple of its own size.
  for (uint32_t address = 0, rest = size; rest != 0;) {
    const uint32_t piece = std::bit_floor(rest);
    free_[std::countr_zero(piece)].insert(address);
    address += piece;
    rest -= piece;
  }
}

std::optional<uint32_t> BuddyAllocator::allocate(uint32_t size) {
  if (size > largest_) return std::nullopt;
  const uint32_t order = static_cast<uint32_t>(std::bit_width(size - 1));
  uint32_t from = order;
  while (from < free_.size() && free_[from].empty()) ++from;
  if (from == free_.size()) return std::nullopt;
  const uint32_t address = *free_[from].begin();
  free_[from].erase(free_[from].begin());
  while (from != order) {
    --from;
    free_[from].insert(address + (uint32_t{1} << from));  // the upper half stays free
  }
  taken_[address] = order;
  allocated_ += uint32_t{1} << order;
  return address;
}

void BuddyAllocator::release(uint32_t address) {
  const auto taken = taken_.find(address);
  if (taken == taken_.end()) throw std::logic_error("nothing is allocated there");
  uint32_t order = taken->second;
  taken_.erase(taken);
  allocated_ -= uint32_t{1} << order;
  // A buddy beyond the end of a piece of the arena was never free, so pieces of the arena never merge.
  for (; order + 1 < free_.size(); ++order) {
    const auto buddy = free_[order].find(address ^ (uint32_t{1} << order));
    if (buddy == free_[order].end()) break;
    free_[order].erase(buddy);
    address &= ~(uint32_t{1} << order);
  }
  free_[order].insert(address);
}

}  // namespace twinplane::simulator
