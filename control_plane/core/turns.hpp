// Whose turn it is to come in: the waiting sequences in the order of the policy, one after the other.
//
//   fcfs, priority    as they stand in the line
//   fair              who has been resident, as they stand in the line; then the first in line of the least served
//                     tenant, again and again
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "control_plane/core/state.hpp"

namespace twinplane::core {

class Turns {
 public:
  Turns() { queues_.reserve(FairShare::kMaxTenants); }

  // From the first one on. `state` is looked at until the next begin(); nothing may change in it but by take().
  void begin(const State& state) {
    state_ = &state;
    next_ = 0;
    has_queues_ = false;
  }

  // The next candidate; null if that were all. The one before is passed over, unless take() said otherwise.
  Sequence* next() {
    const Line& waiting = state_->waiting;
    const bool is_by_line = state_->shares == nullptr || (next_ < waiting.size() && waiting[next_].is_by_line());
    if (is_by_line) return next_ < waiting.size() ? &waiting[next_++] : nullptr;
    if (has_queues_) {
      go_on();
    } else {
      collect();
    }
    return queues_.empty() ? nullptr : &waiting[place_of(queues_.front())];
  }

  // Who stands so many places behind the last candidate, as long as the line is the order of turns; else null.
  const Sequence* upcoming(size_t places) const {
    const size_t at = next_ - 1 + places;
    return !has_queues_ && at < state_->waiting.size() ? &state_->waiting[at] : nullptr;
  }

  // Where the last candidate stands in the line.
  size_t place() const { return has_queues_ ? place_of(queues_.front()) : next_ - 1; }

  // The last candidate, or one behind it, has come in: it is not in the line any more, and its tenant was charged. What
  // stands at the last candidate's place is the next one, if it is still its tenant's turn.
  void take() {
    if (has_queues_) {
      is_taken_ = true;
    } else {
      --next_;
    }
  }

 private:
  // A tenant's newcomers behind those passed over.
  struct Queue {
    FairShare::Turn turn;
    size_t passed_over;

    friend bool operator<(const Queue& a, const Queue& b) { return b.turn < a.turn; }  // for std heaps: least first
  };

  size_t place_of(const Queue& queue) const {
    return state_->waiting.first_from(Sequence::first_order_of(queue.turn.tenant)) + queue.passed_over;
  }

  void collect() {
    has_queues_ = true;
    is_taken_ = false;
    queues_.clear();
    for (const FairShare::Turn& turn : state_->shares->turns()) queues_.push_back({turn, 0});
    std::make_heap(queues_.begin(), queues_.end());
  }

  // On from the candidate at the front.
  void go_on() {
    if (queues_.empty()) return;
    std::pop_heap(queues_.begin(), queues_.end());
    Queue& last = queues_.back();
    if (std::exchange(is_taken_, false)) {
      last.turn.service = state_->shares->virtual_service(last.turn.tenant);
    } else {
      ++last.passed_over;
    }
    if (last.passed_over < state_->shares->num_waiting(last.turn.tenant)) {
      std::push_heap(queues_.begin(), queues_.end());
    } else {
      queues_.pop_back();
    }
  }

  const State* state_ = nullptr;
  size_t next_ = 0;            // by line: place of the next candidate
  bool has_queues_ = false;    // by turns
  bool is_taken_ = false;      // the last candidate, by turns
  std::vector<Queue> queues_;  // a heap; its front is the last candidate's
};

}  // namespace twinplane::core
