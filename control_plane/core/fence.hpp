// The step fence: what a step in flight may still touch is not reused before that step retired (INV-3).
#pragma once

#include <cassert>
#include <cstddef>
#include <vector>

#include "control_plane/core/types.hpp"

namespace twinplane::core {

// First in, first out queue of things that were let go of while steps were in flight. Fences never decrease, because
// each is the number of steps sent when its thing was released; so those that open are always at the front.
template <typename Thing>
class FenceQueue {
 public:
  // `capacity`: how many things there are; none can be in the queue twice.
  explicit FenceQueue(size_t capacity) : entries_(capacity) {}

  size_t size() const { return size_; }

  // `thing` may be reused once `fence` steps have retired.
  void push(Thing thing, StepSeq fence) {
    assert(size_ < entries_.size());
    size_t at = head_ + size_;
    if (at >= entries_.size()) at -= entries_.size();
    entries_[at] = {thing, fence};
    ++size_;
  }

  // Takes out, oldest first, everything whose fence `retired` steps open.
  template <typename Visit>
  void open(StepSeq retired, Visit visit) {
    while (size_ != 0 && entries_[head_].fence <= retired) {
      const Thing thing = entries_[head_].thing;
      if (++head_ == entries_.size()) head_ = 0;
      --size_;
      visit(thing);
    }
  }

  template <typename Visit>
  void for_each(Visit visit) const {
    for (size_t i = 0; i < size_; ++i) visit(entries_[(head_ + i) % entries_.size()].thing);
  }

 private:
  struct Entry {
    Thing thing;
    StepSeq fence;
  };

  std::vector<Entry> entries_;
  size_t head_ = 0;
  size_t size_ = 0;
};

}  // namespace twinplane::core
