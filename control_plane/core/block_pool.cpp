#include "control_plane/core/block_pool.hpp"

#include <cassert>

namespace twinplane::core {

BlockPool::BlockPool(BlockCount total) : counts_(total.value, 0), fenced_(total.value) {
  free_.reserve(total.value);
  for (uint32_t block = total.value; block != 0; --block) free_.push_back({block - 1});
}

BlockId BlockPool::acquire() {
  assert(!free_.empty());
  const BlockId block = free_.back();
  free_.pop_back();
  assert(counts_[block.value] == 0);
  counts_[block.value] = 1;
  return block;
}

void BlockPool::release(BlockId block, StepSeq fence) {
  assert(counts_[block.value] != 0);
  if (--counts_[block.value] != 0) return;
  if (fence <= retired_) {
    free_.push_back(block);
  } else {
    fenced_.push(block, fence);
  }
}

void BlockPool::retire(StepSeq retired) {
  retired_ = retired;
  fenced_.open(retired, [this](BlockId block) { free_.push_back(block); });
}

}  // namespace twinplane::core
