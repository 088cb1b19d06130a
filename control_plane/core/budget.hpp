// What one step can carry, and how it is dealt: tokens, block-table writes, row attachments, and time.
#pragma once

#include <algorithm>

#include "control_plane/core/cost_model.hpp"
#include "control_plane/core/state.hpp"

namespace twinplane::core {

// Prompt tokens a step carries at least if there are any, whatever the latency target says: progress wins. So a prompt
// of n tokens that is first in line is computed within n / kLeastChunkTokens steps.
inline constexpr TokenCount kLeastChunkTokens{16};

// Plain decodes, summed up.
struct DecodeLoad {
  uint32_t decodes = 0;
  uint64_t context = 0;

  void add(const Sequence& sequence) {
    ++decodes;
    context += sequence.num_computed.value + 1;
  }
};

class Budget {
 public:
  explicit Budget(const State& state)
      : costs_(state.session.costs),
        target_us_(state.config.itl_target_us),
        chunk_cap_(state.config.max_chunk_tokens),
        tokens_(state.config.max_step_tokens),
        table_writes_(state.session.capacities.max_table_writes),
        extra_words_{state.session.capacities.max_extra_words} {}

  bool has_tokens() const { return tokens_ != TokenCount{0}; }
  const StepLoad& load() const { return load_; }

  // One decode. There is always room: max_rows <= max_step_tokens, and max_table_writes covers a growth of every row.
  void take_decode(const Sequence& sequence, BlockCount growth) {
    --tokens_;
    table_writes_ -= growth;
    load_.add_decode(sequence.num_computed.value + 1);
  }

  void take_decodes(const DecodeLoad& load, BlockCount growth) {
    tokens_ -= {load.decodes};
    table_writes_ -= growth;
    load_.decodes += load.decodes;
    load_.decode_context += load.context;
  }

  // Both are asked after all decodes were dealt to. If there are any, they wait for this step, and it is to stay within
  // the latency target; nobody waits for a step without.

  // Prompt tokens this step has room for.
  TokenCount allowance() const { return within_target(tokens_, TokenCount{0}, 0); }

  // What this step has for the next chunk of a sequence with `rest` tokens to go behind `context`, once `swaps` blocks
  // of it were moved here; 0 if nothing.
  TokenCount chunk_for(TokenCount rest, TokenCount context, uint32_t swaps = 0) const {
    return within_target(std::min({rest, chunk_cap_, tokens_}), context, swaps);
  }

  TokenCount take_chunk(TokenCount rest, TokenCount context, uint32_t swaps = 0) {
    const TokenCount tokens = chunk_for(rest, context, swaps);
    if (tokens == TokenCount{0}) return tokens;
    tokens_ -= tokens;
    load_.swaps += swaps;
    load_.add_chunk(tokens.value, context.value);
    return tokens;
  }

  // What opening a row takes beside tokens; false (and nothing taken) if this step can not carry it. The next one can:
  // a session's capacities hold the longest request beside every decode's growth.
  bool has_opening(BlockCount table_writes, WordCount extra_words) const {
    return table_writes <= table_writes_ && extra_words <= extra_words_;
  }
  void take_opening(BlockCount table_writes, WordCount extra_words) {
    table_writes_ -= table_writes;
    extra_words_ -= extra_words;
  }

 private:
  TokenCount within_target(TokenCount tokens, TokenCount context, uint32_t swaps) const {
    if (target_us_ == 0 || load_.decodes == 0) return tokens;
    StepLoad load = load_;
    load.swaps += swaps;
    const TokenCount affordable{costs_.affordable(load, context.value, target_us_)};
    return std::min(tokens, load_.chunks == 0 ? std::max(affordable, kLeastChunkTokens) : affordable);
  }

  const CostModel& costs_;
  uint32_t target_us_;  // 0 = none
  StepLoad load_;       // dealt so far
  TokenCount chunk_cap_;
  TokenCount tokens_;
  BlockCount table_writes_;  // one per block
  WordCount extra_words_;
};

}  // namespace twinplane::core
