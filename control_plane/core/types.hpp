// The core's vocabulary. No naked integer crosses a function: an id can not be added, a count of tokens is not a count
// of blocks.
#pragma once

#include <compare>
#include <cstdint>

namespace twinplane::core {

// An identity: compared, never computed with.
template <typename Tag, typename Value>
struct Id {
  Value value;
  friend constexpr auto operator<=>(const Id&, const Id&) = default;
};

using RequestId = Id<struct RequestTag, uint64_t>;
using TenantId = Id<struct TenantTag, uint16_t>;  // a seat in the table of tenants
using RowId = Id<struct RowTag, uint32_t>;
using BlockId = Id<struct BlockTag, uint32_t>;
using HostBlockId = Id<struct HostBlockTag, uint32_t>;  // of the swap pool

inline constexpr RowId kNoRow{~uint32_t{0}};
inline constexpr BlockId kNoBlock{~uint32_t{0}};

// An amount: added and compared within its kind.
template <typename Tag, typename Value>
struct Quantity {
  Value value = 0;

  friend constexpr auto operator<=>(const Quantity&, const Quantity&) = default;
  friend constexpr Quantity operator+(Quantity a, Quantity b) { return {static_cast<Value>(a.value + b.value)}; }
  friend constexpr Quantity operator-(Quantity a, Quantity b) { return {static_cast<Value>(a.value - b.value)}; }
  constexpr Quantity& operator+=(Quantity other) { return *this = *this + other; }
  constexpr Quantity& operator-=(Quantity other) { return *this = *this - other; }
  constexpr Quantity& operator++() { return ++value, *this; }
  constexpr Quantity& operator--() { return --value, *this; }
};

using TokenCount = Quantity<struct TokenTag, uint32_t>;  // also a position: the number of tokens before it
using BlockCount = Quantity<struct BlockCountTag, uint32_t>;
using WordCount = Quantity<struct WordTag, uint32_t>;  // words of row attachments
using Nanos = Quantity<struct NanosTag, uint64_t>;     // CLOCK_MONOTONIC, or the virtual clock of a test

// A number of steps of this session. Step n is the (n+1)-th, so it has retired once `retired > StepSeq{n}`.
using StepSeq = Quantity<struct StepTag, uint64_t>;

// Blocks that `tokens` tokens fill or begin.
constexpr BlockCount blocks_for(TokenCount tokens, TokenCount block_size) {
  return {tokens.value / block_size.value + (tokens.value % block_size.value != 0)};
}

// Full blocks that sequences with the same prompt share: those before the block of the prompt's last token, which each
// of them computes.
constexpr BlockCount shared_blocks(TokenCount prompt_tokens, TokenCount block_size) {
  return {(prompt_tokens.value - 1) / block_size.value};
}

// Why a request ended. Values are part of the Python surface.
enum class FinishReason : uint8_t {
  kNone = 0,
  kEos = 1,
  kStopToken = 2,
  kLength = 3,
  kCancelled = 4,
  kDeadline = 5,
  kNotFinite = 6,
  kQuarantined = 7,
  kStopped = 8,
  kNeverFits = 9,
  kUnreachable = 10,
};
inline constexpr uint32_t kNumFinishReasons = 11;

}  // namespace twinplane::core
