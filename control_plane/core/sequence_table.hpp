// The live sequences by request id, and their owner: open addressing with linear probing in a table made once.
#pragma once

#include <bit>
#include <cassert>
#include <cstdint>
#include <memory>
#include <vector>

#include "control_plane/core/request.hpp"

namespace twinplane::core {

class SequenceTable {
 public:
  // At most half full, so probes stay short.
  explicit SequenceTable(size_t capacity) : slots_(std::bit_ceil(2 * capacity + 1)), mask_(slots_.size() - 1) {}

  size_t size() const { return size_; }

  Sequence* find(RequestId id) const { return slots_[index_of(id)].sequence.get(); }

  // The id will be inserted or taken out soon.
  void prefetch(RequestId id) const { __builtin_prefetch(&slots_[home_of(id)], 1); }

  // The id must be new.
  Sequence& insert(std::unique_ptr<Sequence> sequence) {
    const RequestId id = sequence->id;
    Slot& slot = slots_[index_of(id)];
    assert(slot.sequence == nullptr && 2 * size_ < slots_.size());
    slot = {id, std::move(sequence)};
    ++size_;
    return *slot.sequence;
  }

  // Takes the sequence out. The hole is filled by the entries behind it that would not be found any more.
  std::unique_ptr<Sequence> take(RequestId id) {
    size_t hole = index_of(id);
    assert(slots_[hole].sequence != nullptr);
    std::unique_ptr<Sequence> taken = std::move(slots_[hole].sequence);
    --size_;
    for (size_t i = (hole + 1) & mask_; slots_[i].sequence != nullptr; i = (i + 1) & mask_) {
      const size_t distance_from_home = (i - home_of(slots_[i].id)) & mask_;
      if (distance_from_home >= ((i - hole) & mask_)) {
        slots_[hole] = std::move(slots_[i]);
        hole = i;
      }
    }
    return taken;
  }

  // In no particular order. `visit` must not insert or take.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (const auto& slot : slots_) {
      if (slot.sequence != nullptr) visit(*slot.sequence);
    }
  }

  // Any live sequence, or null.
  Sequence* any() const {
    for (const auto& slot : slots_) {
      if (slot.sequence != nullptr) return slot.sequence.get();
    }
    return nullptr;
  }

 private:
  // The id is here as well, so that looking for one looks at no sequence.
  struct Slot {
    RequestId id{0};
    std::unique_ptr<Sequence> sequence;
  };

  // Finalizer of MurmurHash3: ids are often consecutive, and a caller must not be able to pick a slow table.
  size_t home_of(RequestId id) const {
    uint64_t x = id.value;
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
    return static_cast<size_t>(x ^ (x >> 33)) & mask_;
  }

  // Where the id is, or else where it would go.
  size_t index_of(RequestId id) const {
    size_t i = home_of(id);
    while (slots_[i].sequence != nullptr && slots_[i].id != id) i = (i + 1) & mask_;
    return i;
  }

  std::vector<Slot> slots_;
  size_t mask_;
  size_t size_ = 0;
};

}  // namespace twinplane::core
