// The deadlines of all live sequences, earliest first: a binary heap whose members know their place, so that any can
// leave. The places lie here, not in the sequences: moving a dozen members in the heap looks at none of them.
#pragma once

#include <cassert>
#include <cstdint>
#include <numeric>
#include <vector>

#include "control_plane/core/request.hpp"

namespace twinplane::core {

class Deadlines {
 public:
  explicit Deadlines(size_t capacity) : members_(capacity), free_(capacity) {
    heap_.reserve(capacity);
    std::iota(free_.rbegin(), free_.rend(), 0u);
  }

  // The sequence whose deadline passed first, if any has by `now`.
  Sequence* expired(Nanos now) const {
    return !heap_.empty() && heap_.front().at <= now ? members_[heap_.front().ticket].sequence : nullptr;
  }

  // The earliest one; 0 = there is none.
  Nanos next() const { return heap_.empty() ? Nanos{0} : heap_.front().at; }

  // Sequences without a deadline are not members; both calls ignore them.
  void insert(Sequence& sequence) {
    if (sequence.deadline() == Nanos{0}) return;
    sequence.deadline_ticket = free_.back();
    free_.pop_back();
    members_[sequence.deadline_ticket].sequence = &sequence;
    heap_.push_back({sequence.deadline(), sequence.deadline_ticket});
    sift_up(heap_.size() - 1);
  }

  void erase(Sequence& sequence) {
    if (sequence.deadline() == Nanos{0}) return;
    const uint32_t ticket = sequence.deadline_ticket;
    assert(members_[ticket].sequence == &sequence);
    free_.push_back(ticket);
    const Entry last = heap_.back();
    heap_.pop_back();
    if (last.ticket == ticket) return;
    const size_t at = members_[ticket].place;
    put(at, last);
    sift_down(at);
    sift_up(at);
  }

  size_t size() const { return heap_.size(); }

 private:
  struct Entry {
    Nanos at;
    uint32_t ticket;
  };
  struct Member {
    Sequence* sequence = nullptr;
    uint32_t place = 0;  // in the heap
  };

  void put(size_t i, Entry entry) {
    heap_[i] = entry;
    members_[entry.ticket].place = static_cast<uint32_t>(i);
  }

  void sift_up(size_t i) {
    const Entry entry = heap_[i];
    for (; i != 0 && entry.at < heap_[(i - 1) / 2].at; i = (i - 1) / 2) put(i, heap_[(i - 1) / 2]);
    put(i, entry);
  }

  void sift_down(size_t i) {
    const Entry entry = heap_[i];
    for (size_t child = 2 * i + 1; child < heap_.size(); child = 2 * i + 1) {
      if (child + 1 < heap_.size() && heap_[child + 1].at < heap_[child].at) ++child;
      if (!(heap_[child].at < entry.at)) break;
      put(i, heap_[child]);
      i = child;
    }
    put(i, entry);
  }

  std::vector<Entry> heap_;
  std::vector<Member> members_;  // by ticket
  std::vector<uint32_t> free_;   // tickets
};

}  // namespace twinplane::core
