// The KV blocks of the attached data plane: who may use which, and from when on.
//
//   FREE --acquire--> REFERENCED (count >= 1) --release--> FENCED --its step retired--> FREE
//                                                 |                                      ^
//                                                 +------- no step in flight ------------+
#pragma once

#include <cstdint>
#include <vector>

#include "control_plane/core/fence.hpp"
#include "control_plane/core/types.hpp"

namespace twinplane::core {

class BlockPool {
 public:
  explicit BlockPool(BlockCount total);

  BlockCount total() const { return {static_cast<uint32_t>(counts_.size())}; }
  BlockCount free() const { return {static_cast<uint32_t>(free_.size())}; }
  BlockCount fenced() const { return {static_cast<uint32_t>(fenced_.size())}; }  // soon free
  BlockCount referenced() const { return total() - free() - fenced(); }

  // A free block, now referenced once; its content is whatever was there. There must be one.
  BlockId acquire();

  // One owner fewer. Without owners the block is reusable once `fence` steps have retired.
  void release(BlockId block, StepSeq fence);

  // So many steps have retired: opens their fences.
  void retire(StepSeq retired);

  uint32_t references(BlockId block) const { return counts_[block.value]; }
  const std::vector<BlockId>& free_blocks() const { return free_; }
  const FenceQueue<BlockId>& fenced_blocks() const { return fenced_; }

 private:
  // The only place where a count goes down. True if that was the last owner.
  bool decrement(BlockId block);

  std::vector<uint32_t> counts_;  // owners, by block
  std::vector<BlockId> free_;     // a stack: the block used last is the likeliest to be in some cache
  FenceQueue<BlockId> fenced_;
  StepSeq retired_;
};

}  // namespace twinplane::core
