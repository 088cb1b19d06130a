// Single-producer single-consumer rings of fixed slots over free-running 64-bit counters.
//
//   writer                                        reader
//     room: published - consumed < depth            news: next < published
//       load peer.consumed            [C2]            load peer.published           [P2]
//     fill slot[published % depth]                  read slot[next % depth] in place
//     store published+1               [P1]          store consumed                  [C1]
//     ring(reader's bell)                           if the ring was full [P3]: ring(writer's bell)
//
// [P1] pairs with [P2]: who sees the counter sees the slot. [C1] pairs with [C2]: who sees the counter knows that the
// reader has done its last load from the slot, and may overwrite it. Release and acquire would do for that.
//
// They are sequentially consistent because of [P3], the reader's look at `published` after [C1]: it rings only if it
// made room in a full ring, since nobody else waits for room (otherwise each step would wake the control plane twice,
// once for nothing). A writer about to sleep has stored [P1], filling the ring, before it loaded [C2] and saw no room.
// In the one order of all four, either [C1] comes before that [C2], and the writer saw room; or [P3] comes after [P1],
// and the reader sees the ring full.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "shared/csrc/bell.hpp"
#include "shared/csrc/mapping.hpp"
#include "shared/csrc/wire.hpp"
#include "shared/csrc/word.hpp"

namespace twinplane::shm {

// The slots of one ring; the same for both ends.
struct Slots {
  std::byte* base;
  uint64_t bytes;  // of one slot
  uint32_t depth;

  std::byte* at(uint64_t sequence) const { return base + (sequence % depth) * bytes; }
};

// The producing end. One thread.
class RingWriter {
 public:
  // `published` is this end's own word, `consumed` the peer's; `peer_bell` is where the reader sleeps.
  RingWriter(Slots slots, uint64_t& published, const uint64_t& consumed, wire::Bell& peer_bell)
      : slots_(slots), published_(&published), consumed_(&consumed), peer_bell_(&peer_bell) {}

  bool has_room() const {
    return *published_ - load(*consumed_, std::memory_order_seq_cst) < slots_.depth;  // [C2]
  }

  // Number of the slot to be published next; it is the slot's step number.
  uint64_t sequence() const { return *published_; }

  // The slot to fill. Only while has_room(): before that the reader may still be in it.
  std::byte* slot() const { return slots_.at(*published_); }
  uint64_t slot_bytes() const { return slots_.bytes; }

  // Hands slot() to the reader; from here on it is not the writer's.
  void publish() {
    pass(Point::kBeforePublish);
    store(*published_, *published_ + 1, std::memory_order_seq_cst);  // [P1]
    pass(Point::kAfterPublish);
    ring(*peer_bell_);
  }

 private:
  Slots slots_;
  uint64_t* published_;
  const uint64_t* consumed_;
  wire::Bell* peer_bell_;
};

// The consuming end. One thread. Several slots may be open at once: next() moves on without giving back.
class RingReader {
 public:
  // `consumed` is this end's own word, `published` the peer's; `peer_bell` is where the writer sleeps.
  RingReader(Slots slots, const uint64_t& published, uint64_t& consumed, wire::Bell& peer_bell)
      : slots_(slots), published_(&published), consumed_(&consumed), peer_bell_(&peer_bell), next_(consumed) {}

  bool has_news() const { return next_ < load(*published_, std::memory_order_seq_cst); }  // [P2]

  // Takes the next slot: its number. Only while has_news().
  uint64_t next() { return next_++; }

  // The slot's bytes; valid until consume(sequence).
  const std::byte* slot(uint64_t sequence) const {
    if (sequence < *consumed_ || sequence >= next_) throw_out_of_range("slot", sequence);
    return slots_.at(sequence);
  }
  uint64_t slot_bytes() const { return slots_.bytes; }

  // Gives back every slot up to and including `sequence`, and rings if the writer may be waiting for one.
  void consume(uint64_t sequence) {
    if (sequence < *consumed_ || sequence >= next_) throw_out_of_range("consume", sequence);
    const uint64_t before = *consumed_;
    pass(Point::kBeforeConsume);
    store(*consumed_, sequence + 1, std::memory_order_seq_cst);  // [C1]
    pass(Point::kAfterConsume);
    if (load(*published_, std::memory_order_seq_cst) - before >= slots_.depth) ring(*peer_bell_);  // [P3]
  }

 private:
  [[noreturn]] void throw_out_of_range(const char* what, uint64_t sequence) const {
    throw std::out_of_range(std::string(what) + " " + std::to_string(sequence) + ": open are the slots from " +
                            std::to_string(*consumed_) + " up to, not including, " + std::to_string(next_));
  }

  Slots slots_;
  const uint64_t* published_;
  uint64_t* consumed_;
  wire::Bell* peer_bell_;
  uint64_t next_;  // first slot not taken yet; consumed <= next <= published
};

inline Slots step_slots(const Session& s) {
  return {s.steps(), wire::StepSlotLayout(s.capacities()).bytes, s.capacities().ring_depth};
}
inline Slots result_slots(const Session& s) {
  return {s.results(), wire::ResultSlotLayout(s.capacities()).bytes, s.capacities().ring_depth};
}

// The four ends of a session. Steps go from the control plane to the data plane, results the other way.
inline RingWriter step_writer(const Session& s) {
  return {step_slots(s), s.control().published, s.data().consumed, s.data_bell()};
}
inline RingReader step_reader(const Session& s) {
  return {step_slots(s), s.control().published, s.data().consumed, s.control_bell()};
}
inline RingWriter result_writer(const Session& s) {
  return {result_slots(s), s.data().published, s.control().consumed, s.control_bell()};
}
inline RingReader result_reader(const Session& s) {
  return {result_slots(s), s.data().published, s.control().consumed, s.data_bell()};
}

}  // namespace twinplane::shm
