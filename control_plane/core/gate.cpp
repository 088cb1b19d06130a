#include "control_plane/core/gate.hpp"

#include "control_plane/core/group.hpp"

#include <algorithm>

namespace twinplane::core {
namespace {

std::string text(uint64_t value) { return std::to_string(value); }

}  // namespace

std::optional<Refusal> never_fits(TokenCount prompt_tokens, const RequestParams& params, const Pool& pool,
                                  WordCount max_extra_words) {
  const TokenCount tokens = prompt_tokens + params.max_tokens - TokenCount{1};  // the last one is never stored
  const uint32_t sequences = params.num_sequences();
  const BlockCount shared = sequences == 1 ? BlockCount{0} : shared_blocks(prompt_tokens, pool.block_size);
  const BlockCount apart = blocks_for(tokens, pool.block_size) - shared;
  const BlockCount needed{shared.value + sequences * apart.value};
  if (needed > pool.num_blocks) {
    return Refusal{"NEVER_FITS", pool.num_blocks.value, needed.value,
                   "the request needs " + text(needed.value) + " KV blocks (" + text(prompt_tokens.value) +
                       " prompt tokens + " + (sequences == 1 ? "" : text(sequences) + " x ") + "max_tokens " +
                       text(params.max_tokens.value) + ", " + text(pool.block_size.value) +
                       " tokens per block), the whole pool has " + text(pool.num_blocks.value) + " (" +
                       text(uint64_t{pool.num_blocks.value} * pool.block_size.value) +
                       " tokens); shorten the prompt, lower max_tokens or give the data plane more KV memory"};
  }
  // At its longest it is opened again just before its last token.
  // The sequences of a group are opened in one step.
  const WordCount words{sequences * extra_words(params, prompt_tokens, params.max_tokens - TokenCount{1}).value};
  if (words > max_extra_words) {
    return Refusal{"NEVER_FITS", max_extra_words.value, words.value,
                   "the request's logit_bias, allowed tokens, stop ids and penalty history take " + text(words.value) +
                       " words, a step carries " + text(max_extra_words.value) +
                       " (max_extra_words); shorten the lists"};
  }
  return std::nullopt;
}

std::optional<Refusal> Gate::enter(RequestId id, std::span<const int32_t> prompt, RequestParams params, Nanos now,
                                   const std::function<void(std::unique_ptr<Sequence>)>& deliver) {
  const std::lock_guard lock(mutex_);
  const TokenCount prompt_tokens{static_cast<uint32_t>(std::min<size_t>(prompt.size(), UINT32_MAX))};
  if (auto refusal = judge(id, prompt_tokens, params)) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    return refusal;
  }
  const uint32_t sequences = params.num_sequences();
  auto first = make_request(id, prompt, std::move(params), {block_size_.load(std::memory_order_relaxed)}, now);
  for (uint32_t i = 0; i < sequences; ++i) live_.insert(id.value + i);
  join_queue(*first);
  if (first->has_group) {
    for (const auto& member : first->group->newcomers) join_queue(*member);
  }
  deliver(std::move(first));
  return std::nullopt;
}

std::optional<Refusal> Gate::judge(RequestId id, TokenCount prompt, const RequestParams& params) const {
  if (is_closed_) return Refusal{"STOPPING", 0, 0, "the engine is stopping and accepts no more requests"};
  if (prompt.value == 0) return Refusal{"EMPTY_PROMPT", 1, 0, "the prompt is empty, it must hold at least 1 token"};
  for (uint64_t used = id.value; used < id.value + params.num_sequences(); ++used) {
    if (!live_.contains(used)) continue;
    return Refusal{"DUPLICATE_ID", 1, used, "request id " + text(used) + " is in use by a live request"};
  }
  if (num_blocks_.load(std::memory_order_relaxed) == 0) {
    return Refusal{"NO_DATA_PLANE", 0, 0, "no data plane has attached yet, so there is nothing to run the request on"};
  }
  if (auto refusal = judge_length(prompt, params)) return refusal;
  if (auto refusal = judge_group(params)) return refusal;
  return judge_queue(prompt, params.num_sequences());
}

std::optional<Refusal> Gate::judge_length(TokenCount prompt, const RequestParams& params) const {
  const uint64_t limit = config_.max_model_len.value;
  const uint64_t asked = uint64_t{prompt.value} + params.max_tokens.value;
  if (asked > limit) {
    return Refusal{"PROMPT_TOO_LONG", limit, asked,
                   "prompt (" + text(prompt.value) + " tokens) plus max_tokens (" + text(params.max_tokens.value) +
                       ") is " + text(asked) + ", the context limit (max_model_len) is " + text(limit) +
                       "; shorten the prompt or lower max_tokens"};
  }
  const Pool pool{{num_blocks_.load(std::memory_order_relaxed)}, {block_size_.load(std::memory_order_relaxed)}, {}};
  return never_fits(prompt, params, pool, {max_extra_words_.load(std::memory_order_relaxed)});
}

// A group is in the queue, and on the device, as a whole.
std::optional<Refusal> Gate::judge_group(const RequestParams& params) const {
  const uint32_t sequences = params.num_sequences();
  const uint32_t most = std::min(config_.max_rows, config_.max_waiting_requests);
  if (sequences > most) {
    return Refusal{"NEVER_FITS", most, sequences,
                   "the request has " + text(sequences) + " sequences (n or beam_width), at most " + text(most) +
                       " fit: max_rows is " + text(config_.max_rows) + ", max_waiting_requests " +
                       text(config_.max_waiting_requests)};
  }
  const uint64_t stops = params.eos_token_ids.size() + params.stop_token_ids.size();
  const uint64_t candidates = params.beams.width > 1 ? params.beams.width * std::max<uint64_t>(2, 1 + stops) : 0;
  if (candidates > kMaxCandidates) {
    return Refusal{"NEVER_FITS", kMaxCandidates, candidates,
                   "a beam search of width " + text(params.beams.width) + " with " + text(stops) +
                       " end-of-sequence and stop tokens looks at " + text(candidates) +
                       " candidates per beam, the limit is " + text(kMaxCandidates) +
                       "; use a smaller width or fewer stop tokens"};
  }
  return std::nullopt;
}

std::optional<Refusal> Gate::judge_queue(TokenCount prompt, uint32_t sequences) const {
  const uint64_t requests = waiting_requests();
  if (requests + sequences > config_.max_waiting_requests) {
    return Refusal{"QUEUE_FULL", config_.max_waiting_requests, requests + sequences,
                   text(requests) + " requests wait, the limit (max_waiting_requests) is " +
                       text(config_.max_waiting_requests) + "; retry later",
                   "requests"};
  }
  // A request that finds the queue empty is never refused for its length: else one longer than the bound, which the
  // pool could serve, would be refused for ever.
  const uint64_t tokens = waiting_tokens();
  if (requests != 0 && tokens + prompt.value > config_.max_waiting_tokens) {
    return Refusal{"QUEUE_FULL", config_.max_waiting_tokens, tokens + prompt.value,
                   text(tokens) + " tokens wait and the request would add " + text(prompt.value) +
                       ", the limit (max_waiting_tokens) is " + text(config_.max_waiting_tokens) + "; retry later",
                   "tokens"};
  }
  return std::nullopt;
}

void Gate::forget(RequestId id) {
  const std::lock_guard lock(mutex_);
  live_.erase(id.value);
}

void Gate::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
}

void Gate::set_pool(const Pool& pool, WordCount max_extra_words) {
  block_size_.store(pool.block_size.value, std::memory_order_relaxed);
  max_extra_words_.store(max_extra_words.value, std::memory_order_relaxed);
  num_blocks_.store(pool.num_blocks.value, std::memory_order_relaxed);
}

void Gate::join_queue(Sequence& sequence) {
  // A group's prompt is computed once.
  sequence.queued_tokens = sequence.index == 0 ? sequence.num_tokens : sequence.emitted();
  waiting_requests_.fetch_add(1, std::memory_order_relaxed);
  waiting_tokens_.fetch_add(sequence.queued_tokens.value, std::memory_order_relaxed);
}

void Gate::put_back(Sequence& sequence) {
  join_queue(sequence);
  dequeued_requests_.fetch_sub(1, std::memory_order_relaxed);
  dequeued_tokens_.fetch_sub(sequence.queued_tokens.value, std::memory_order_relaxed);
}

void Gate::leave_queue(Sequence& sequence) {
  dequeued_requests_.fetch_add(1, std::memory_order_relaxed);
  dequeued_tokens_.fetch_add(sequence.queued_tokens.value, std::memory_order_relaxed);
  waiting_requests_.fetch_sub(1, std::memory_order_relaxed);
  waiting_tokens_.fetch_sub(sequence.queued_tokens.value, std::memory_order_relaxed);
}

}  // namespace twinplane::core
