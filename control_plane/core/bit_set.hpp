// A set of small numbers, one bit each, fixed in size. Scans look at 64 members at a time.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace twinplane::core {

class BitSet {
 public:
  explicit BitSet(size_t size) : words_((size + 63) / 64) {}

  void set(size_t i) { words_[i / 64] |= bit(i); }
  void reset(size_t i) { words_[i / 64] &= ~bit(i); }
  bool test(size_t i) const { return (words_[i / 64] & bit(i)) != 0; }
  void clear() { std::fill(words_.begin(), words_.end(), 0); }

  bool empty() const {
    for (const uint64_t word : words_) {
      if (word != 0) return false;
    }
    return true;
  }
  size_t count() const {
    size_t n = 0;
    for (const uint64_t word : words_) n += static_cast<size_t>(std::popcount(word));
    return n;
  }

  // The smallest member; the set must not be empty.
  size_t first() const {
    size_t w = 0;
    while (words_[w] == 0) ++w;
    return w * 64 + static_cast<size_t>(std::countr_zero(words_[w]));
  }

  // Every member, ascending. `visit` may remove the member it is given.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (size_t w = 0; w < words_.size(); ++w) {
      for (uint64_t rest = words_[w]; rest != 0; rest &= rest - 1) {
        visit(w * 64 + static_cast<size_t>(std::countr_zero(rest)));
      }
    }
  }

 private:
  static constexpr uint64_t bit(size_t i) { return uint64_t{1} << (i % 64); }

  std::vector<uint64_t> words_;
};

}  // namespace twinplane::core
