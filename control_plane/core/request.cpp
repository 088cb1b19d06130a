#include "control_plane/core/request.hpp"

#include <algorithm>
#include <cassert>
#include <cstddef>

#include "control_plane/core/request_heap.hpp"

namespace twinplane::core {
namespace {

constexpr uint32_t kRecordHeader = 3;  // {row, kind, n}

uint32_t record(size_t words) { return words == 0 ? 0 : kRecordHeader + static_cast<uint32_t>(words); }

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

// What every tick touches of a running sequence is two cache lines of it.
static_assert(offsetof(Sequence, is_following) < 64 && offsetof(Sequence, published) == 64);
static_assert(offsetof(Sequence, arrival) + sizeof(uint64_t) <= 128);

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

// Where in its piece of memory a sequence has its arrays.
struct Sequence::Layout {
  Layout(TokenCount prompt, const RequestParams& params, TokenCount block_size)
      : num_blocks(blocks_for(prompt + params.max_tokens - TokenCount{1}, block_size)) {
    blocks = place<BlockId>(num_blocks.value);
    tokens = place<int32_t>(prompt.value + size_t{params.max_tokens.value});
    choices = params.logprobs ? place<Choice>(params.max_tokens.value) : 0;
    saved = place<HostBlockId>(num_blocks.value);
  }

  // `count` things more.
  template <typename T>
  size_t place(size_t count) {
    static_assert(alignof(T) == alignof(uint32_t) && std::is_trivially_destructible_v<T>);
    const size_t at = bytes;
    bytes += count * sizeof(T);
    return at;
  }

  size_t bytes = sizeof(Sequence);
  BlockCount num_blocks;
  size_t blocks, tokens, choices, saved;  // offsets; 0: there is none
};

std::unique_ptr<Sequence> Sequence::make(RequestId request, std::span<const int32_t> prompt, RequestParams params,
                                         TokenCount block_size, Nanos now) {
  const Layout layout({static_cast<uint32_t>(prompt.size())}, params, block_size);
  void* const piece = allocate_request(layout.bytes);
  try {
    return std::unique_ptr<Sequence>(new (piece) Sequence(request, prompt, std::move(params), layout, now));
  } catch (...) {
    free_request(piece, layout.bytes);
    throw;
  }
}

void Sequence::operator delete(Sequence* sequence, std::destroying_delete_t) {
  const size_t bytes = sequence->bytes;
  sequence->~Sequence();
  free_request(sequence, bytes);
}

Sequence::Sequence(RequestId request, std::span<const int32_t> prompt, RequestParams request_params,
                   const Layout& layout, Nanos now)
    : num_tokens{static_cast<uint32_t>(prompt.size())},
      limit(num_tokens + request_params.max_tokens),
      prompt_tokens(num_tokens),
      stops(sorted_stops(request_params)),
      stops_from(request_params.min_tokens),
      id(request),
      block_capacity(layout.num_blocks),
      params(std::move(request_params)),
      submitted(now),
      bytes(layout.bytes) {
  std::byte* const piece = reinterpret_cast<std::byte*>(this);
  blocks = reinterpret_cast<BlockId*>(piece + layout.blocks);
  tokens = reinterpret_cast<int32_t*>(piece + layout.tokens);
  choices = layout.choices == 0 ? nullptr : reinterpret_cast<Choice*>(piece + layout.choices);
  saved = reinterpret_cast<HostBlockId*>(piece + layout.saved);
  std::ranges::copy(prompt, tokens);
  for (const StopToken& stop : stops) {
    const auto bits = static_cast<uint32_t>(stop.token);
    stop_filter |= uint64_t{1} << bits % 64 | uint64_t{1} << bits / 64 % 64;
  }
}

void Sequence::fit_blocks(TokenCount block_size) {
  assert(num_blocks.value == 0);
  const BlockCount needed = blocks_for(kv_limit(), block_size);
  if (needed <= block_capacity) return;
  longer_blocks = std::make_unique_for_overwrite<BlockId[]>(needed.value);
  longer_saved = std::make_unique_for_overwrite<HostBlockId[]>(needed.value);
  blocks = longer_blocks.get();
  saved = longer_saved.get();
  block_capacity = needed;
}

FinishReason Sequence::stop_reason_at(int32_t token, TokenCount emitted_then) const {
  if (emitted_then <= stops_from) return FinishReason::kNone;
  const auto stop = std::ranges::lower_bound(stops, token, {}, &StopToken::token);
  return stop != stops.end() && stop->token == token ? stop->reason : FinishReason::kNone;
}

void Sequence::become(SequenceState next) {
  using enum SequenceState;
  assert((state == kWaiting && next == kRunning) ||  // admit
         (state == kRunning && next == kWaiting) ||  // preempt, data plane lost
         (state != kFinished && next == kFinished));
  state = next;
}

}  // namespace twinplane::core
