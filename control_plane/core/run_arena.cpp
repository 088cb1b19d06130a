#include "control_plane/core/run_arena.hpp"

#include <algorithm>
#include <bit>
#include <cassert>

namespace twinplane::core {

RunArena::RunArena(uint32_t at_least, TokenCount block_size) : block_size_(block_size.value) {
  const uint32_t slots = std::bit_ceil(std::max(at_least, 1u));
  tokens_ = make_huge_page_array<int32_t>(uint64_t{slots} * block_size_);
  blocks_ = make_huge_page_array<BlockId>(slots);
  heads_.assign(static_cast<size_t>(std::countr_zero(slots)) + 1, kNone);
  links_.assign(slots, {kNone, kNone});
  orders_.assign(slots, kNotFree);
  users_.assign(slots, 0);
  push(0, static_cast<uint32_t>(heads_.size()) - 1);
  num_free_ = slots;
}

void RunArena::push(uint32_t slot, uint32_t order) {
  links_[slot] = {kNone, heads_[order]};
  if (heads_[order] != kNone) links_[heads_[order]].previous = slot;
  heads_[order] = slot;
  orders_[slot] = static_cast<uint8_t>(order);
}

void RunArena::unlink(uint32_t slot, uint32_t order) {
  const Link link = links_[slot];
  (link.previous == kNone ? heads_[order] : links_[link.previous].next) = link.next;
  if (link.next != kNone) links_[link.next].previous = link.previous;
  orders_[slot] = kNotFree;
}

Extent RunArena::allocate(uint32_t blocks) {
  assert(blocks != 0);
  const uint32_t wanted = static_cast<uint32_t>(std::bit_width(blocks - 1));  // the order of bit_ceil(blocks)
  uint32_t order = wanted;
  while (order < heads_.size() && heads_[order] == kNone) ++order;
  if (order >= heads_.size()) {  // the largest piece there is
    order = std::min(wanted, static_cast<uint32_t>(heads_.size()));
    do {
      if (order-- == 0) return {};
    } while (heads_[order] == kNone);
  }
  const uint32_t slot = heads_[order];
  unlink(slot, order);
  while (order > wanted) {
    --order;
    push(slot + (1u << order), order);
  }
  num_free_ -= 1u << order;
  users_[slot] = 1;
  return {slot, 1u << order};
}

void RunArena::free(Extent extent) {
  assert(users_[extent.slot] != 0);
  if (--users_[extent.slot] == 0) free_piece(extent);
}

void RunArena::shrink(Extent& extent, uint32_t& begin, uint32_t size) {
  if (users_[extent.slot] != 1) return;
  while (extent.capacity > 1) {
    const uint32_t half = extent.capacity / 2;
    if (begin + size <= half) {
      free_piece({extent.slot + half, half});
    } else if (begin >= half) {
      free_piece({extent.slot, half});
      users_[extent.slot] = 0;
      extent.slot += half;
      users_[extent.slot] = 1;
      begin -= half;
    } else {
      return;
    }
    extent.capacity = half;
  }
}

void RunArena::free_piece(Extent extent) {
  assert(std::has_single_bit(extent.capacity) && extent.slot % extent.capacity == 0);
  num_free_ += extent.capacity;
  uint32_t slot = extent.slot;
  uint32_t order = static_cast<uint32_t>(std::countr_zero(extent.capacity));
  while (order + 1 < heads_.size()) {
    const uint32_t buddy = slot ^ (1u << order);
    if (orders_[buddy] != order) break;
    unlink(buddy, order);
    slot &= ~(1u << order);
    ++order;
  }
  push(slot, order);
}

}  // namespace twinplane::core
