// The KV blocks of the attached data plane that are nobody's or a sequence's own. (Those of the prefix cache are the
// prefix tree's; block_manager.hpp puts the two together.)
//
//   FREE --acquire--> REFERENCED (count >= 1) --release--> FENCED --its step retired--> FREE
//     ^                    |                          |                                   ^
//     |                    +--hand_over--> the tree   +------- no step in flight ---------+
//     +------put------------------------------+
#pragma once

#include <cassert>
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

  // A free block, now referenced once; its content is whatever was there. There must be one.
  BlockId acquire();

  // One owner more.
  void share(BlockId block) { ++counts_[block.value]; }

  // One owner fewer. Without owners the block is reusable once `fence` steps have retired.
  void release(BlockId block, StepSeq fence);

  // The only owner gives the block to the prefix tree, which gives it back by put().
  void hand_over(BlockId block) {
    assert(counts_[block.value] == 1);
    counts_[block.value] = 0;
  }
  void put(BlockId block) { free_.push_back(block); }

  // So many steps have retired: opens their fences.
  void retire(StepSeq retired);

  uint32_t references(BlockId block) const { return counts_[block.value]; }
  const std::vector<BlockId>& free_blocks() const { return free_; }
  const FenceQueue<BlockId>& fenced_blocks() const { return fenced_; }

 private:
  std::vector<uint32_t> counts_;  // owners, by block
  std::vector<BlockId> free_;     // a stack: the block used last is the likeliest to be in some cache
  FenceQueue<BlockId> fenced_;
  StepSeq retired_;
};

}  // namespace twinplane::core
