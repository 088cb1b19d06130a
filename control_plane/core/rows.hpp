// The data plane's rows: who sits where, and from when on a seat may be taken again.
//
// A row whose sequence left is, independently of each other,
//   closing  until a step has told the data plane (`closes`), and
//   fenced   until the steps that name it have retired; only then may it be taken again.
// Both may end in the same step: `closes` come before `opens`.
#pragma once

#include <cassert>
#include <cstdint>
#include <span>
#include <vector>

#include "control_plane/core/bit_set.hpp"
#include "control_plane/core/fence.hpp"
#include "control_plane/core/request.hpp"
#include "control_plane/core/types.hpp"

namespace twinplane::core {

class Rows {
 public:
  explicit Rows(uint32_t count) : seats_(count), free_(count), closing_(count), fenced_(count) {
    for (uint32_t row = 0; row < count; ++row) free_.set(row);
    num_free_ = count;
  }

  uint32_t size() const { return static_cast<uint32_t>(seats_.size()); }
  uint32_t num_free() const { return num_free_; }
  uint32_t num_fenced() const { return static_cast<uint32_t>(fenced_.size()); }
  bool is_free(RowId row) const { return free_.test(row.value); }
  const BitSet& closing() const { return closing_; }

  // Whom a token sampled in this row is for: its sequence, also if that left while the token was in flight; null if the
  // sequence has ended.
  Sequence* owner(RowId row) const { return seats_[row.value].owner; }

  struct Seat {
    Sequence* owner = nullptr;
    uint32_t num_candidates = 0;  // the row returns with each token, also if its sequence has ended
  };
  // By row. Stays where it is.
  std::span<const Seat> seats() const { return seats_; }

  // There must be a free row.
  void seat(Sequence& sequence) {
    const size_t row = free_.first();
    free_.reset(row);
    --num_free_;
    seats_[row] = {&sequence, sequence.num_candidates};
    sequence.row = {static_cast<uint32_t>(row)};
  }

  // The sequence leaves the device. It keeps its claim on tokens in flight until `fence` steps have retired.
  void vacate(Sequence& sequence, StepSeq fence) {
    closing_.set(sequence.row.value);
    fenced_.push(sequence.row, fence);
  }

  // The sequence has ended: what is still sampled in its row is for nobody.
  void disown(Sequence& sequence) {
    if (sequence.row == kNoRow) return;
    seats_[sequence.row.value].owner = nullptr;
    sequence.row = kNoRow;
  }

  // The closes have been sent.
  void clear_closing() { closing_.clear(); }

  // So many steps have retired: opens their fences.
  void retire(StepSeq retired) {
    fenced_.open(retired, [this](RowId row) {
      Seat& seat = seats_[row.value];
      if (seat.owner != nullptr) seat.owner->row = kNoRow;
      seat.owner = nullptr;
      free_.set(row.value);
      ++num_free_;
    });
  }

 private:
  std::vector<Seat> seats_;
  BitSet free_;
  uint32_t num_free_ = 0;
  BitSet closing_;
  FenceQueue<RowId> fenced_;
};

}  // namespace twinplane::core
