// The door: what may come in. It answers on the caller's thread, at once, from what the core last said of itself;
// the core never waits for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>

#include "control_plane/core/config.hpp"
#include "control_plane/core/request.hpp"

namespace twinplane::core {

// Why a request was not accepted. `message` names the limit, its value and what was asked.
struct Refusal {
  const char* reason;
  uint64_t limit;
  uint64_t asked;
  std::string message;
  const char* unit = "";  // of a full queue: what there are too many of, "requests" or "tokens"
};

class Gate {
 public:
  explicit Gate(const Config& config) : config_(config) {}

  // --- any thread --------------------------------------------------------------------------------------------------

  // Refuses the request, or builds its sequence and gives it to `deliver`. The whole call holds the gate's lock, so
  // after close() returned nothing more is delivered. May throw std::bad_alloc; then nothing has happened.
  std::optional<Refusal> enter(RequestId id, std::span<const int32_t> prompt, RequestParams params, Nanos now,
                               const std::function<void(std::unique_ptr<Sequence>)>& deliver);

  // The request's last event was delivered: its id may be used again.
  void forget(RequestId id);

  // From now on everything is refused.
  void close();

  uint64_t waiting_requests() const { return waiting_requests_.load(std::memory_order_relaxed); }
  uint64_t waiting_tokens() const { return waiting_tokens_.load(std::memory_order_relaxed); }
  // What has left the queue since the start, less what was put back: how fast it empties.
  uint64_t dequeued_requests() const { return dequeued_requests_.load(std::memory_order_relaxed); }
  uint64_t dequeued_tokens() const { return dequeued_tokens_.load(std::memory_order_relaxed); }
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

  // --- the core's thread -------------------------------------------------------------------------------------------

  // A session began; its pool judges from now on. A request judged by the last one is judged again by the core.
  void set_pool(const Pool& pool, WordCount max_extra_words);

  // The bound of the queue counts every request that is not resident: newcomers (counted by enter()) and those put
  // back.
  void put_back(Sequence& sequence);
  void leave_queue(Sequence& sequence);

 private:
  void join_queue(Sequence& sequence);
  std::optional<Refusal> judge(RequestId id, TokenCount prompt, const RequestParams& params) const;
  std::optional<Refusal> judge_length(TokenCount prompt, const RequestParams& params) const;
  std::optional<Refusal> judge_queue(TokenCount prompt, uint32_t sequences) const;
  std::optional<Refusal> judge_group(const RequestParams& params) const;

  const Config config_;
  std::mutex mutex_;
  std::unordered_set<uint64_t> live_;  // guarded by mutex_: from enter() to forget()
  bool is_closed_ = false;             // guarded by mutex_

  // Written by the core. Relaxed: each stands for itself, and a mixture of two sessions is repaired by the core.
  std::atomic<uint32_t> num_blocks_{0};  // 0: there has never been a session
  std::atomic<uint32_t> block_size_{0};
  std::atomic<uint32_t> max_extra_words_{0};
  // Raised by enter() under the lock, so never past the bound by newcomers; lowered by the core at any time.
  std::atomic<uint64_t> waiting_requests_{0};
  std::atomic<uint64_t> waiting_tokens_{0};
  std::atomic<uint64_t> dequeued_requests_{0};
  std::atomic<uint64_t> dequeued_tokens_{0};
  std::atomic<uint64_t> refused_{0};
};

// What keeps a request from ever running on this pool; nullopt if nothing does.
std::optional<Refusal> never_fits(TokenCount prompt_tokens, const RequestParams& params, const Pool& pool,
                                  WordCount max_extra_words);

}  // namespace twinplane::core
