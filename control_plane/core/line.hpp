// Sequences in serving order (Sequence::precedes) in one contiguous array: the waiting queue, and the running set.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <span>
#include <vector>

#include "control_plane/core/request.hpp"

namespace twinplane::core {

class Line {
 public:
  // Never holds more than `capacity`.
  explicit Line(size_t capacity) : slots_(2 * capacity) {}

  size_t size() const { return end_ - begin_; }
  bool empty() const { return begin_ == end_; }
  Sequence& operator[](size_t i) const { return *slots_[begin_ + i]; }

  std::span<Sequence* const> members() const { return {slots_.data() + begin_, size()}; }

  void clear() { begin_ = end_ = 0; }

  // Newcomers go to the end; one that comes back goes to its old place.
  void insert(Sequence& sequence) {
    if (end_ == slots_.size()) move_to_front();
    const bool is_last = empty() || (*this)[size() - 1].precedes(sequence);
    const auto at = is_last ? slot(end_) : slot_of(sequence);
    std::move_backward(at, slot(end_), slot(end_ + 1));
    *at = &sequence;
    ++end_;
  }

  void erase(Sequence& sequence) {
    const auto at = &(*this)[0] == &sequence ? slot(begin_) : slot_of(sequence);
    assert(at != slot(end_) && *at == &sequence);
    if (at == slot(begin_)) {
      ++begin_;
    } else {
      std::move(at + 1, slot(end_), at);
      --end_;
    }
  }

  size_t place_of(const Sequence& sequence) { return static_cast<size_t>(slot_of(sequence) - slots_.begin()) - begin_; }

  // Place of the first one whose order is at least this.
  size_t first_from(uint64_t order) const {
    const auto end = slots_.begin() + static_cast<std::ptrdiff_t>(end_);
    const auto at = std::lower_bound(slots_.begin() + static_cast<std::ptrdiff_t>(begin_), end, order,
                                     [](const Sequence* a, uint64_t least) { return a->order < least; });
    return static_cast<size_t>(at - slots_.begin()) - begin_;
  }

 private:
  using Slot = std::vector<Sequence*>::iterator;

  Slot slot(size_t i) { return slots_.begin() + static_cast<std::ptrdiff_t>(i); }

  Slot slot_of(const Sequence& sequence) {
    return std::lower_bound(slot(begin_), slot(end_), &sequence,
                            [](const Sequence* a, const Sequence* b) { return a->precedes(*b); });
  }

  // Twice the capacity, so that this happens once in `capacity` insertions at most.
  void move_to_front() {
    std::move(slot(begin_), slot(end_), slot(0));
    end_ -= begin_;
    begin_ = 0;
  }

  std::vector<Sequence*> slots_;  // in use: [begin_, end_)
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace twinplane::core
