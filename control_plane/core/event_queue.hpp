// News from the core's thread (producer) to the polling thread (consumer): sequences that have something to report.
//
// A sequence is its own event: its tokens lie in its token array, `published` says how many of them may be read, and its link
// puts it into the queue at most once. So a slow reader makes no queue grow: it finds several tokens in one event.
//
// `Sequence::handoff` decides who may touch the link, and ends the sequence's life. Both sides change it by
// read-modify-write only, so their changes have one order:
//
//   core                                              poller, having taken the sequence from the queue
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
#pragma once

#include <cstdint>
#include <memory>

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
    note(sequence, kQueued);                                                        // [E2]
  }

  // `finish` and `match` are set. Hands the sequence over: the caller must not touch it again.
  void announce_end(std::unique_ptr<Sequence> sequence) {
    sequence->published.store(sequence->emitted().value, std::memory_order_release);
    note(*sequence.release(), kQueued | kFinished);  // [E5]
  }

  // Makes everything announced visible to the poller, as one batch. True if the poller has to be woken.
  bool flush() {
    if (newest_ == nullptr) return false;
    const bool was_empty = queue_.push_chain(newest_, oldest_);
    newest_ = oldest_ = nullptr;
    return was_empty;
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

  void note(Sequence& sequence, uint32_t bits) {
    if ((sequence.handoff.fetch_or(bits, std::memory_order_acq_rel) & kQueued) != 0) return;
    sequence.next_event = newest_;
    newest_ = &sequence;
    if (oldest_ == nullptr) oldest_ = &sequence;
  }

  Inbox<Sequence, &Sequence::next_event> queue_;
  Sequence* newest_ = nullptr;  // announced, not flushed
  Sequence* oldest_ = nullptr;
};

}  // namespace twinplane::core
