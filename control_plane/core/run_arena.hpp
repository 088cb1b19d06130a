// Memory for the runs of the prefix tree: token ids and block ids of consecutive blocks, each contiguous, so that a
// long prompt is compared and handed over by two linear reads (a cache line per block would cost 20-75 us for 500
// blocks).
#pragma once

#include <cstdint>
#include <vector>

#include "control_plane/core/huge_pages.hpp"
#include "control_plane/core/types.hpp"

namespace twinplane::core {

// Room for `capacity` blocks from `slot` on. capacity is a power of two, or 0: no room.
struct Extent {
  uint32_t slot = 0;
  uint32_t capacity = 0;
};

// A buddy allocator (Knowlton, CACM 1965) over two parallel arrays made once. A run of n blocks that has an extent of
// its own takes less than 2n slots.
class RunArena {
 public:
  // `slots`: at least, a power of two in fact.
  RunArena(uint32_t slots, TokenCount block_size);

  // Room for `blocks`, or for as many as the largest free piece holds if that is less.
  Extent allocate(uint32_t blocks);

  // One more run lives in the extent; it is free when as many have freed it.
  void share(Extent extent) { ++users_[extent.slot]; }
  void free(Extent extent);

  // Of an extent with one user, of which slots [begin, begin + size) are in use: gives the rest back as far as halves
  // can be cut off, and moves `begin` along.
  void shrink(Extent& extent, uint32_t& begin, uint32_t size);

  // The tokens and block ids of the extent that begins at `slot`.
  int32_t* tokens(uint32_t slot) { return tokens_.get() + uint64_t{slot} * block_size_; }
  const int32_t* tokens(uint32_t slot) const { return tokens_.get() + uint64_t{slot} * block_size_; }
  BlockId* blocks(uint32_t slot) { return blocks_.get() + slot; }
  const BlockId* blocks(uint32_t slot) const { return blocks_.get() + slot; }

  uint32_t num_free() const { return num_free_; }
  uint32_t size() const { return static_cast<uint32_t>(links_.size()); }

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  static constexpr uint8_t kNotFree = 0xff;

  struct Link {
    uint32_t previous, next;
  };

  void free_piece(Extent piece);
  void push(uint32_t slot, uint32_t order);
  void unlink(uint32_t slot, uint32_t order);

  uint32_t block_size_;
  HugePageArray<int32_t> tokens_;
  HugePageArray<BlockId> blocks_;
  std::vector<uint32_t> heads_;     // of the free lists, by order
  HugePageVector<Link> links_;      // by slot; of a free piece's first slot
  std::vector<uint8_t> orders_;     // by slot; the order of the free piece that begins here, or kNotFree
  HugePageVector<uint32_t> users_;  // by slot; of the extent that begins here
  uint32_t num_free_ = 0;
};

}  // namespace twinplane::core
