// A request as the core holds it. Everything it will ever need is allocated by the submitting thread, in one piece; the
// tick only fills it in, and the polling thread frees it (INV-11).
#pragma once

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "control_plane/core/beam_search.hpp"
#include "control_plane/core/prefix_tree.hpp"
#include "control_plane/core/types.hpp"

namespace twinplane::core {

// What the data plane does with a row's logits; it travels in RowOpen and the row's extras.
struct Sampling {
  float temperature = 0.0f;  // 0 = greedy
  float top_p = 1.0f;
  float min_p = 0.0f;
  uint32_t top_k = 0;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  uint64_t seed = 0;
  uint32_t stream = 0;
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<int32_t> allowed_token_ids;

  bool has_penalties() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }
};

// How likely the chosen token was.
struct Choice {
  float logprob;
  uint32_t rank;  // 1 = the likeliest
};

// A token that ends its sequence, and what it is then called.
struct StopToken {
  int32_t token;
  FinishReason reason;  // kEos or kStopToken
};

struct RequestParams {
  TokenCount max_tokens{1};  // >= 1
  TokenCount min_tokens{0};  // so many are emitted before a stop token may be
  std::vector<int32_t> eos_token_ids;
  std::vector<int32_t> stop_token_ids;
  Sampling sampling;
  uint32_t n = 1;    // samples of one prompt, each a sequence; sample i draws from stream + i
  BeamParams beams;  // instead of samples
  bool logprobs = false;
  int32_t priority = 0;    // higher is served first
  Nanos deadline;          // 0 = none
  bool uses_cache = true;  // finds blocks of others in the prefix tree, and leaves its own there
  Namespace cache_key{};   // and only those with this key
  std::string tenant;      // who asks; what policy fair shares between

  uint32_t num_sequences() const { return std::max({n, beams.width, 1u}); }
};

// Words the extras of a row take that is opened after `emitted` tokens of output.
WordCount extra_words(const RequestParams& params, TokenCount prompt_tokens, TokenCount emitted);

// WAITING: in the queue. RUNNING: has a row and blocks. FINISHED: for the poller to read and free.
enum class SequenceState : uint8_t { kWaiting, kRunning, kFinished };

// How many sequences ahead a loop over them asks for memory: about as long as a miss takes.
inline constexpr uint32_t kPrefetchDistance = 8;

struct Group;

// One chain of tokens: a request, or a member of its group.
//
// Known tokens are those in `tokens` and, at most one per step in flight, those being sampled (`num_pending`).
//
//      tokens   [ prompt ........ | emitted .... ]  pending
//               0          prompt_tokens     num_tokens     known()
//      computed [ .................... ]                              KV written by the steps sent so far
//                                num_computed <= known()
//
// The core's thread owns every field, except those marked for the poller.
struct alignas(64) Sequence {
  // With its arrays behind it. Throws std::bad_alloc.
  static std::unique_ptr<Sequence> make(RequestId request, std::span<const int32_t> prompt, RequestParams params,
                                        TokenCount block_size, Nanos now);
  static void operator delete(Sequence* sequence, std::destroying_delete_t);
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  TokenCount known() const { return num_tokens + num_pending; }
  TokenCount distance() const { return known() - num_computed; }
  Nanos deadline() const { return params.deadline; }
  TokenCount emitted() const { return num_tokens - prompt_tokens; }
  // The last token is sampled but never computed, so it needs no place in the KV cache.
  TokenCount kv_limit() const { return limit - TokenCount{1}; }
  // The token that ends it by length is in flight: there is nothing left to compute.
  bool ends_in_flight() const { return known() == limit; }
  // A decode's computed tokens, once the data plane has made up to `num_substeps` tokens of it.
  TokenCount computed_after(uint32_t num_substeps) const {
    return num_computed + std::min(TokenCount{num_substeps}, limit - known());
  }
  // Its blocks do not hold all known tokens: a decode that enters a new one.
  bool needs_block(TokenCount block_size) const {
    return known().value > uint64_t{num_blocks.value} * block_size.value;
  }
  // Positions to own before it is resident: the known tokens and the next one, so that it reaches its next token
  // without asking for more (INV-7).
  TokenCount admission_tokens() const { return std::min(known() + TokenCount{1}, kv_limit()); }

  // Serving order of both lines: by the policy, then first come.
  bool precedes(const Sequence& other) const {
    return order != other.order ? order < other.order : arrival < other.arrival;
  }

  // What a sequence's `order` is: 0 where all are equal; the priority, higher first; or with policy fair, of a
  // newcomer, its tenant before that, so that the newcomers of each stand together, behind those who have been
  // resident.
  uint64_t priority_order() const { return static_cast<uint64_t>(int64_t{INT32_MAX} - params.priority); }
  static uint64_t first_order_of(TenantId tenant) { return (uint64_t{tenant.value} + 1) << 32; }
  // It waits at its place in the line, not for a turn of its tenant.
  bool is_by_line() const { return order >> 32 == 0; }

  // The token, as the sequence's output token number `emitted`, ends it.
  bool is_stop(int32_t token, TokenCount emitted) const {
    return stop_reason_at(token, emitted) != FinishReason::kNone;
  }
  // What a stop token's end is called.
  FinishReason stop_reason(int32_t token) const { return stop_reason_at(token, limit); }
  FinishReason stop_reason_at(int32_t token, TokenCount emitted) const;
  // A known token more.
  void push(int32_t token) {
    tokens[num_tokens.value] = token;
    ++num_tokens;
  }
  bool is_swapped() const { return saved_tokens != TokenCount{0}; }
  // Its first block that is its own; those before are the tree's, or not there yet.
  BlockCount first_own_block() const { return std::max(tree_blocks, missing_blocks); }

  // Takes a sampled token; what it means for the sequence.
  FinishReason append(int32_t token, Choice choice) {
    assert(num_pending.value != 0 && num_tokens < limit);
    prefetch_places();
    if (choices != nullptr) choices[emitted().value] = choice;
    push(token);
    --num_pending;
    if (may_be_stop(token)) {
      if (const FinishReason reason = stop_reason_at(token, emitted()); reason != FinishReason::kNone) {
        match = token;
        return reason;
      }
    }
    return num_tokens == limit ? FinishReason::kLength : FinishReason::kNone;
  }

  // The one transition function; asserts that the contract's diagram has the edge.
  void become(SequenceState next);

  // Loops over many sequences ask for those a few turns ahead: each is a cache miss or several, and they overlap. What
  // every plan reads, and what else every token writes.
  void prefetch_progress() const { __builtin_prefetch(this, 1); }
  void prefetch_news() const { __builtin_prefetch(&published, 1); }
  // All of it, the arrays' beginnings included: it is about to come in, or to end.
  void prefetch_whole() const {
    constexpr size_t kLine = 64;
    const auto* const begin = reinterpret_cast<const std::byte*>(this);
    for (size_t at = 0; at < sizeof(Sequence) + kLine; at += kLine) __builtin_prefetch(begin + at, 1, 2);
    __builtin_prefetch(tokens);
  }
  // The places append() will write to some tokens later: a line that is new comes from far.
  void prefetch_places() const {
    constexpr uint32_t kAhead = 2;
    __builtin_prefetch(tokens + num_tokens.value + kAhead, 1);
    if (choices != nullptr) __builtin_prefetch(choices + emitted().value + kAhead, 1);
  }

  // Makes the block lists long enough for another block size. Allocates only if that is smaller than the last one.
  void fit_blocks(TokenCount block_size);

  // --- first cache line: read by every plan, written by every token and step ---------------------------------------
  int32_t* tokens;          // [limit]
  BlockId* blocks;          // [block_capacity], in order of position
  Choice* choices;          // [max_tokens], or null if not asked for; below `published` the poller may read
  TokenCount num_tokens;    // prompt + emitted
  TokenCount num_pending;   // sampled by steps in flight
  TokenCount num_computed;  // by the steps sent so far
  BlockCount num_blocks;
  RowId row = kNoRow;  // its seat; after it left the device, the seat steps in flight still name
  TokenCount limit;    // prompt + max_tokens
  TokenCount prompt_tokens;
  SequenceState state = SequenceState::kWaiting;
  bool is_protected = false;  // resumed and no token emitted since: may not be preempted (INV-7)
  uint8_t failed_steps = 0;   // consecutive failed steps it was in
  bool has_group = false;
  bool is_following = false;  // its prompt is being computed by the first of its group

  // --- second cache line: handing tokens over, and the place in a line ---------------------------------------------
  alignas(64) std::atomic<uint32_t> published{0};  // output tokens the poller may read
  std::atomic<uint32_t> handoff{0};                // see event_queue.hpp
  Sequence* next_event = nullptr;                  // link; belongs to whoever the handoff says
  uint64_t batch = 0;                              // of events, the last one it was in
  uint32_t reported = 0;                           // output tokens the poller has reported; the poller's alone
  bool is_to_look_at = false;                      // is in doubt
  FinishReason finish = FinishReason::kNone;       // for the poller; with the last event only, as the next one is
  Nanos last_token;
  uint64_t stop_filter = 0;  // two bits for each stop token: most tokens need no look at `stops`
  uint64_t order = 0;        // place in a line, before arrival
  uint64_t arrival = 0;      // kept for life, whatever happens (A05)

  // --- the rest: coming, going, and what the poller may read with any event, because it is final before the first
  // token is published
  std::vector<StopToken> stops;  // sorted by token
  TokenCount stops_from;         // output tokens before a stop token counts (min_tokens)
  RequestId id;
  int32_t match = -1;                   // the token that ended it; for the poller, with the last event only
  Sequence* next_to_look_at = nullptr;  // link of those in doubt, see event_queue.hpp
  TenantId tenant{0};
  uint32_t deadline_ticket = 0;  // its number among those with deadlines
  TokenCount queued_tokens;      // what it counts for in the bound of the waiting queue
  BlockCount block_capacity;     // length of `blocks` and `saved`: blocks_for(kv_limit)
  NodeId node = kRootNode;       // where its path through the prefix tree ends
  BlockCount tree_blocks;        // the first so many of its blocks are that path
  BlockCount missing_blocks;     // while it follows: the first so many of its blocks will be shared
  std::shared_ptr<Group> group;
  uint32_t index = 0;           // in its group
  uint32_t num_candidates = 0;  // the row returns with each token
  // While it waits, swapped out: its blocks from number `saved_from` on lie in the host's pool, with the KV of its
  // first `saved_tokens` tokens.
  HostBlockId* saved;  // [block_capacity]
  BlockCount saved_from;
  BlockCount num_saved;
  TokenCount saved_tokens;
  BlockId copy_source{0};        // of the block in which the prompt ends, until the copy is sent ...
  NodeId copy_node = kRootNode;  // ... kept by this pin, if it is the tree's,
  bool has_copy_source = false;  // ... or else by a reference
  float score = 0.0f;            // of a finished beam
  bool was_resident = false;     // has been admitted before
  uint32_t overtaken = 0;        // times an equal that came later came in before, for what was cached of it
  RequestParams params;
  Nanos submitted;
  Nanos first_scheduled;
  Nanos first_token;
  TokenCount cached_tokens;
  uint32_t preemptions = 0;  // with the last event only
  Nanos estimate;            // with the last event, if it ended as kUnreachable: what its prompt would have taken
  const size_t bytes;        // of the piece that this object begins
  std::unique_ptr<BlockId[]> longer_blocks;     // in place of the piece's, if a session has smaller blocks than
  std::unique_ptr<HostBlockId[]> longer_saved;  // there were when the request came

 private:
  // A Bloom filter of two bits for each stop token.
  bool may_be_stop(int32_t token) const {
    const auto bits = static_cast<uint32_t>(token);
    return (stop_filter >> bits % 64 & stop_filter >> bits / 64 % 64 & 1) != 0;
  }

  struct Layout;
  Sequence(RequestId request, std::span<const int32_t> prompt, RequestParams request_params, const Layout& layout,
           Nanos now);
};

}  // namespace twinplane::core
