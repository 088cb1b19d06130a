// News from the core's thread (producer) to the polling thread (consumer): sequences that have something to report.
//
// A sequence is its own event: its tokens lie in its token array, `published` says how many of them may be read, and
// its link puts it into the queue at most once. So a slow reader makes no queue grow: it finds several tokens in one
// event.
//
// The core first collects a batch, on a link of its own, and hands it over in one go. `Sequence::handoff` then decides
// who may touch the shared link, and ends the sequence's life. Both sides change it by read-modify-write only, so their
// changes have one order:
//
//   core, handing over                                poller, having taken the sequence from the queue
//     tokens, then published = n    release  [E1]
//     fetch_or  QUEUED              acq_rel  [E2]       next = link
//       was not QUEUED: link it in                      old = fetch_and ~QUEUED        acq_rel  [E3]
//     at the end: finish, match                         n = published                  acquire  [E4]
//     fetch_or  QUEUED | FINISHED   acq_rel  [E5]       report tokens up to n
//       was not QUEUED: link it in                      old had FINISHED: report the end, delete
//       never touch it again
//
// [E5] before [E3]: the sequence was in the queue, the core links nothing, the poller sees FINISHED and deletes.
// [E5] after [E3]: the core links it once more, and that visit sees FINISHED. Either way exactly one visit does,
// and it is the last. [E1] pairs with [E4], [E5] with [E3].
//
// Why the batch: a locked instruction waits for all stores before it. One after each token would wait for that token's
// cache misses; after the batch they have long been written (measured: a quarter of the tick).
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "control_plane/core/inbox.hpp"
#include "control_plane/core/request.hpp"

namespace twinplane::core {

class EventQueue {
 public:
  EventQueue() = default;
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;
  // Frees what finished and was never polled. Sequences that are still live belong to the scheduler.
  ~EventQueue() {
    flush();
    poll([](const Sequence&, uint32_t, uint32_t, bool) {});
  }

  // --- the core's thread -------------------------------------------------------------------------------------------

  // Tokens were appended.
  void announce(Sequence& sequence) {
    sequence.published.store(sequence.emitted().value, std::memory_order_release);  // [E1]
    collect(sequence);
  }

  // `finish` and `match` are set. Takes the sequence over: the caller must not touch it again.
  void announce_end(std::unique_ptr<Sequence> sequence) { announce(*sequence.release()); }

  // Hands everything announced to the poller, as one batch. True if the poller has to be woken.
  bool flush() {
    Sequence* newest = nullptr;
    Sequence* oldest = nullptr;
    for (Sequence* sequence = std::exchange(batch_, nullptr); sequence != nullptr;) {
      Sequence* const next = std::exchange(sequence->next_in_batch, nullptr);
      __builtin_prefetch(next != nullptr ? &next->next_in_batch : nullptr, 1);  // before the locked instruction
      sequence->is_in_batch = false;
      if (!hand_over(*sequence)) {  // linked in already; it may be gone by now
        sequence = next;
        continue;
      }
      (oldest == nullptr ? newest : oldest->next_event) = sequence;
      oldest = sequence;
      sequence = next;
    }
    return newest != nullptr && queue_.push_chain(newest, oldest);
  }

  // --- the polling thread ------------------------------------------------------------------------------------------

  // visit(sequence, from, to, is_last) for each sequence with news: output tokens [from, to) are new. After the last
  // visit the sequence is freed.
  template <typename Visit>
  void poll(Visit visit) {
    for (Sequence* sequence = queue_.take_all(); sequence != nullptr;) {
      Sequence* const next = sequence->next_event;  // before [E3]: after it the link is the core's
      const uint32_t old = sequence->handoff.fetch_and(~kQueued, std::memory_order_acq_rel);  // [E3]
      const bool is_last = (old & kFinished) != 0;
      const uint32_t to = sequence->published.load(std::memory_order_acquire);  // [E4]
      const std::unique_ptr<Sequence> owner(is_last ? sequence : nullptr);
      if (is_last || to != sequence->reported) visit(*sequence, sequence->reported, to, is_last);
      if (!is_last) sequence->reported = to;
      sequence = next;
    }
  }

 private:
  static constexpr uint32_t kQueued = 1;
  static constexpr uint32_t kFinished = 2;

  void collect(Sequence& sequence) {
    if (std::exchange(sequence.is_in_batch, true)) return;
    sequence.next_in_batch = std::exchange(batch_, &sequence);
  }

  // True if the sequence is to be linked in.
  static bool hand_over(Sequence& sequence) {
    if (sequence.state == SequenceState::kFinished) {
      return (sequence.handoff.fetch_or(kQueued | kFinished, std::memory_order_acq_rel) & kQueued) == 0;  // [E5]
    }
    return (sequence.handoff.fetch_or(kQueued, std::memory_order_acq_rel) & kQueued) == 0;  // [E2]
  }

  Inbox<Sequence, &Sequence::next_event> queue_;
  Sequence* batch_ = nullptr;  // announced, not flushed; newest first
};

}  // namespace twinplane::core
