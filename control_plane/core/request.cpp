#include "control_plane/core/request.hpp"

#include <algorithm>
#include <cassert>

namespace twinplane::core {
namespace {

constexpr uint32_t kRecordHeader = 3;  // {row, kind, n}

uint32_t record(size_t words) { return words == 0 ? 0 : kRecordHeader + static_cast<uint32_t>(words); }

uint32_t filter_bit(int32_t token) { return 1u << (static_cast<uint32_t>(token) % 32); }

std::vector<StopToken> sorted_stops(const RequestParams& params) {
  std::vector<StopToken> stops;
  stops.reserve(params.eos_token_ids.size() + params.stop_token_ids.size());
  for (const int32_t token : params.eos_token_ids) stops.push_back({token, FinishReason::kEos});
  for (const int32_t token : params.stop_token_ids) stops.push_back({token, FinishReason::kStopToken});
  // Stable, and EOS first: a token that is both ends the sequence as EOS.
  std::ranges::stable_sort(stops, {}, &StopToken::token);
  return stops;
}

}  // namespace

WordCount extra_words(const RequestParams& params, TokenCount prompt_tokens, TokenCount emitted) {
  const Sampling& sampling = params.sampling;
  uint32_t words = record(2 * sampling.logit_bias.size()) + record(sampling.allowed_token_ids.size());
  if (sampling.repetition_penalty != 1.0f) words += record(prompt_tokens.value);
  if (sampling.has_penalties()) words += record(emitted.value);
  const size_t stops = params.eos_token_ids.size() + params.stop_token_ids.size();
  if (stops != 0) words += record(1 + stops);
  if (params.min_tokens.value != 0 && stops != 0) words += record(1 + stops);
  return {words};
}

Sequence::Sequence(RequestId request, std::span<const int32_t> prompt, RequestParams request_params,
                   TokenCount block_size, Nanos now)
    : num_tokens{static_cast<uint32_t>(prompt.size())},
      limit(num_tokens + request_params.max_tokens),
      prompt_tokens(num_tokens),
      stops_from(request_params.min_tokens),
      stop_filter(0),
      stops(sorted_stops(request_params)),
      id(request),
      params(std::move(request_params)),
      submitted(now) {
  tokens = std::make_unique_for_overwrite<int32_t[]>(limit.value);
  std::ranges::copy(prompt, tokens.get());
  if (params.logprobs) choices = std::make_unique_for_overwrite<Choice[]>(params.max_tokens.value);
  for (const StopToken& stop : stops) stop_filter |= filter_bit(stop.token);
  fit_blocks(block_size);
}

void Sequence::fit_blocks(TokenCount block_size) {
  assert(num_blocks.value == 0);
  const BlockCount needed = blocks_for(kv_limit(), block_size);
  if (needed <= block_capacity) return;
  blocks = std::make_unique_for_overwrite<BlockId[]>(needed.value);
  saved = std::make_unique_for_overwrite<HostBlockId[]>(needed.value);
  block_capacity = needed;
}

FinishReason Sequence::stop_reason_at(int32_t token, TokenCount emitted_then) const {
  if (emitted_then <= stops_from) return FinishReason::kNone;
  const auto stop = std::ranges::lower_bound(stops, token, {}, &StopToken::token);
  return stop != stops.end() && stop->token == token ? stop->reason : FinishReason::kNone;
}

FinishReason Sequence::append(int32_t token, float logprob, uint32_t rank) {
  assert(num_pending.value != 0 && num_tokens < limit);
  if (choices != nullptr) choices[emitted().value] = {logprob, rank};
  push(token);
  --num_pending;
  if ((stop_filter & filter_bit(token)) != 0) {
    if (const FinishReason reason = stop_reason_at(token, emitted()); reason != FinishReason::kNone) {
      match = token;
      return reason;
    }
  }
  return num_tokens == limit ? FinishReason::kLength : FinishReason::kNone;
}

void Sequence::become(SequenceState next) {
  using enum SequenceState;
  assert((state == kWaiting && next == kRunning) ||  // admit
         (state == kRunning && next == kWaiting) ||  // preempt, data plane lost
         (state != kFinished && next == kFinished));
  state = next;
}

}  // namespace twinplane::core
