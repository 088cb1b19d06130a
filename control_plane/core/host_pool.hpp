// The swap pool: blocks in host memory where a preempted sequence's KV waits for its return.
#pragma once

#include <cassert>
#include <cstdint>
#include <vector>

#include "control_plane/core/fence.hpp"
#include "control_plane/core/types.hpp"

namespace twinplane::core {

//   FREE --acquire--> HELD --release--> FENCED (until the steps that move it have retired) --> FREE
class HostPool {
 public:
  explicit HostPool(BlockCount total) : total_(total), fenced_(total.value) {
    free_.reserve(total.value);
    for (uint32_t block = total.value; block != 0; --block) free_.push_back({block - 1});
  }

  BlockCount total() const { return total_; }
  BlockCount free() const { return {static_cast<uint32_t>(free_.size())}; }
  BlockCount fenced() const { return {static_cast<uint32_t>(fenced_.size())}; }

  // There must be a free one.
  HostBlockId acquire() {
    assert(!free_.empty());
    const HostBlockId block = free_.back();
    free_.pop_back();
    return block;
  }

  void release(HostBlockId block, StepSeq fence) {
    if (fence <= retired_) {
      free_.push_back(block);
    } else {
      fenced_.push(block, fence);
    }
  }

  void retire(StepSeq retired) {
    retired_ = retired;
    fenced_.open(retired, [this](HostBlockId block) { free_.push_back(block); });
  }

 private:
  BlockCount total_;
  std::vector<HostBlockId> free_;
  FenceQueue<HostBlockId> fenced_;
  StepSeq retired_;
};

}  // namespace twinplane::core
