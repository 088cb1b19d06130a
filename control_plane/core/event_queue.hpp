// News from the core's thread (producer) to the polling thread (consumer): sequences that have something to report.
//
// A sequence is its own event: its tokens lie in its token array, `published` says how many of them may be read, and
// its link puts it into the queue at most once. So a slow reader makes no queue grow: it finds several tokens in one
// event.
//
// The core first collects a batch, chained on that link, and hands it over in one go. `Sequence::handoff` decides who
// may touch the link, and ends the sequence's life.
//
//   core                                              poller, having taken the sequence from the queue
//     tokens, then published = n       release [E1]     next = link
//     read handoff                     acquire [E2]     old = fetch_and ~QUEUED        seq_cst [E3]
//       not QUEUED: set it, chain it                    n = published                  seq_cst [E4]
//       QUEUED: to be looked at again                   report tokens up to n
//     before the batch goes, of those: a fence, seq_cst [E5]
//     read handoff                     acquire [E6]     old had FINISHED: report the end, delete
//       not QUEUED: set it, chain it
//     at the end, instead: finish, match, then
//     fetch_or  QUEUED | FINISHED      acq_rel [E7]
//       was not QUEUED: chain it
//       never touch it again
//
// QUEUED clear ([E2], [E6]): the poller has read the link, and neither it nor `handoff` is the poller's to touch until
// the sequence is in the queue again. So a plain store sets the bit, and [E1] is seen through the queue.
// QUEUED set, after the fence ([E6]): [E3] is yet to come, behind the fence in the order of all that is seq_cst, so
// [E4] sees what [E1] wrote. Without the fence ([E2]) that is not known. Most are not in the queue, and need none.
// [E7] before [E3]: the sequence was in the queue, the core chains nothing, the poller sees FINISHED and deletes.
// [E7] after [E3]: the core chains it once more, and that visit sees FINISHED. Either way exactly one visit does, and
// it is the last. [E1] pairs with [E4]; [E2], [E6] and [E7] with [E3].
//
// What the poller has reported just now may be announced again: that visit finds nothing new.
//
// Why ends wait for the batch: from [E7] on the sequence may be gone, and with it its group, which the core may be
// walking through. Why one fence for all: it waits for the stores before it, which are cache misses; after each token,
// it or a locked instruction would take a quarter of the tick.
#pragma once

#include <atomic>
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
    if (std::exchange(sequence.batch, batch_) == batch_) return;
    if (!chain_if_free(sequence)) look_again(sequence);  // [E2]
  }

  // `finish` and `match` are set. Takes the sequence over: the caller must not touch it again.
  void announce_end(std::unique_ptr<Sequence> owned) {
    Sequence& sequence = *owned.release();
    sequence.published.store(sequence.emitted().value, std::memory_order_release);  // [E1]
    look_again(sequence);
  }

  // Hands everything announced to the poller, as one batch. True if the poller has to be woken.
  bool flush() {
    if (to_look_at_ != nullptr) std::atomic_thread_fence(std::memory_order_seq_cst);  // [E5]
    while (to_look_at_ != nullptr) {
      Sequence& sequence = *to_look_at_;
      to_look_at_ = std::exchange(sequence.next_to_look_at, nullptr);
      __builtin_prefetch(to_look_at_ != nullptr ? &to_look_at_->published : nullptr, 1);
      sequence.is_to_look_at = false;
      if (sequence.finish == FinishReason::kNone) {
        chain_if_free(sequence);                                                                                // [E6]
      } else if ((sequence.handoff.fetch_or(kQueued | kFinished, std::memory_order_acq_rel) & kQueued) == 0) {  // [E7]
        chain(sequence);
      }
    }
    ++batch_;
    Sequence* const oldest = std::exchange(oldest_, nullptr);
    return oldest != nullptr && queue_.push_chain(std::exchange(newest_, nullptr), oldest);
  }

  // --- the polling thread ------------------------------------------------------------------------------------------

  // visit(sequence, from, to, is_last) for each sequence with news: output tokens [from, to) are new. After the last
  // visit the sequence is freed.
  template <typename Visit>
  void poll(Visit visit) {
    for (Sequence* sequence = queue_.take_all(); sequence != nullptr;) {
      Sequence* const next = sequence->next_event;  // before [E3]: after it the link is the core's
      const uint32_t old = sequence->handoff.fetch_and(~kQueued, std::memory_order_seq_cst);  // [E3]
      const bool is_last = (old & kFinished) != 0;
      const uint32_t to = sequence->published.load(std::memory_order_seq_cst);  // [E4]
      const std::unique_ptr<Sequence> owner(is_last ? sequence : nullptr);
      if (is_last || to != sequence->reported) visit(*sequence, sequence->reported, to, is_last);
      if (!is_last) sequence->reported = to;
      sequence = next;
    }
  }

 private:
  static constexpr uint32_t kQueued = 1;
  static constexpr uint32_t kFinished = 2;

  // False if it is in the queue, or may be.
  bool chain_if_free(Sequence& sequence) {
    if ((sequence.handoff.load(std::memory_order_acquire) & kQueued) != 0) return false;
    sequence.handoff.store(kQueued, std::memory_order_relaxed);
    chain(sequence);
    return true;
  }

  void chain(Sequence& sequence) {
    sequence.next_event = std::exchange(newest_, &sequence);
    if (oldest_ == nullptr) oldest_ = &sequence;
  }

  void look_again(Sequence& sequence) {
    if (std::exchange(sequence.is_to_look_at, true)) return;
    sequence.next_to_look_at = std::exchange(to_look_at_, &sequence);
  }

  Inbox<Sequence, &Sequence::next_event> queue_;
  uint64_t batch_ = 1;  // the number of the one being collected
  Sequence* newest_ = nullptr;
  Sequence* oldest_ = nullptr;      // of the chain
  Sequence* to_look_at_ = nullptr;  // again, before the batch goes
};

}  // namespace twinplane::core
