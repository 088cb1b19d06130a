// What one step can carry, and how it is dealt: tokens, block-table writes, row attachments.
#pragma once

#include <algorithm>

#include "control_plane/core/state.hpp"

namespace twinplane::core {

class Budget {
 public:
  explicit Budget(const State& state)
      : chunk_cap_(state.config.max_chunk_tokens),
        tokens_(state.config.max_step_tokens),
        table_writes_(state.session.capacities.max_table_writes),
        extra_words_{state.session.capacities.max_extra_words} {}

  bool has_tokens() const { return tokens_ != TokenCount{0}; }

  // One decode. There is always room: max_rows <= max_step_tokens, and max_table_writes covers a growth of every row.
  void take_decode(BlockCount growth) {
    --tokens_;
    table_writes_ -= growth;
  }

  // Tokens of a chunk, of the `rest` there is to do.
  TokenCount take_chunk(TokenCount rest) {
    const TokenCount tokens = std::min({rest, chunk_cap_, tokens_});
    tokens_ -= tokens;
    return tokens;
  }

  // What opening a row takes beside tokens; false (and nothing taken) if this step can not carry it. The next one can:
  // a session's capacities hold the longest request beside every decode's growth.
  bool take_opening(BlockCount table_writes, WordCount extra_words) {
    if (table_writes > table_writes_ || extra_words > extra_words_) return false;
    table_writes_ -= table_writes;
    extra_words_ -= extra_words;
    return true;
  }

 private:
  TokenCount chunk_cap_;
  TokenCount tokens_;
  BlockCount table_writes_;  // one per block
  WordCount extra_words_;
};

}  // namespace twinplane::core
