// Writes one step slot (PROTOCOL.md, section 5). The plan keeps every region within the session's capacities.
#pragma once

#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "control_plane/core/types.hpp"
#include "shared/csrc/wire.hpp"

namespace twinplane::core {

class StepWriter {
 public:
  StepWriter(std::byte* slot, const wire::Capacities& capacities)
      : slot_(slot), layout_(capacities), capacities_(capacities) {}

  void close(RowId row) {
    assert(counts_.num_closes < capacities_.max_rows);
    region<uint32_t>(layout_.closes)[counts_.num_closes++] = row.value;
  }

  void open(const wire::RowOpen& row) {
    assert(counts_.num_opens < capacities_.max_rows);
    region<wire::RowOpen>(layout_.opens)[counts_.num_opens++] = row;
  }

  // One record of `words` words, filled by the caller.
  std::span<uint32_t> extra(RowId row, wire::ExtraKind kind, size_t words) {
    assert(counts_.num_extra_words + 3 + words <= capacities_.max_extra_words);
    uint32_t* const record = region<uint32_t>(layout_.extras) + counts_.num_extra_words;
    record[0] = row.value;
    record[1] = kind;
    record[2] = static_cast<uint32_t>(words);
    counts_.num_extra_words += 3 + static_cast<uint32_t>(words);
    return {record + 3, words};
  }

  void fork(RowId row, RowId parent, BlockCount blocks) {
    assert(counts_.num_forks < capacities_.max_rows);
    region<wire::RowFork>(layout_.forks)[counts_.num_forks++] = {row.value, parent.value, blocks.value};
  }

  void write_table(RowId row, BlockCount index, BlockId block) {
    assert(counts_.num_table_writes < capacities_.max_table_writes);
    region<wire::TableWrite>(layout_.table_writes)[counts_.num_table_writes++] = {row.value, index.value, block.value};
  }

  // Room for so many more swaps in one direction.
  uint32_t room_for_swap_outs() const { return capacities_.max_swaps - counts_.num_swap_outs; }
  uint32_t room_for_swap_ins() const { return capacities_.max_swaps - counts_.num_swap_ins; }
  uint32_t num_swaps() const { return counts_.num_swap_outs + counts_.num_swap_ins; }
  void swap_out(BlockId block, HostBlockId host) {
    assert(room_for_swap_outs() != 0);
    region<wire::BlockSwap>(layout_.swap_outs)[counts_.num_swap_outs++] = {block.value, host.value};
  }
  void swap_in(HostBlockId host, BlockId block) {
    assert(room_for_swap_ins() != 0);
    region<wire::BlockSwap>(layout_.swap_ins)[counts_.num_swap_ins++] = {block.value, host.value};
  }

  void copy(BlockId source, BlockId target) {
    assert(counts_.num_copies < capacities_.max_copies);
    region<wire::BlockCopy>(layout_.copies)[counts_.num_copies++] = {source.value, target.value};
  }

  // The next scheduled sequence; decodes come before chunks. `known` are the tokens from `position` on that the core
  // knows; if they are fewer than `num_tokens`, the last one is relayed: the token this row sampled last.
  void schedule(RowId row, TokenCount position, std::span<const int32_t> known, TokenCount num_tokens, uint32_t flags) {
    assert(counts_.num_seqs < capacities_.max_rows);
    assert(counts_.num_tokens + num_tokens.value <= capacities_.max_step_tokens);
    assert(known.size() == num_tokens.value || known.size() + 1 == num_tokens.value);
    region<wire::SeqEntry>(layout_.seqs)[counts_.num_seqs++] = {
        .row = row.value,
        .position = position.value,
        .num_tokens = num_tokens.value,
        .token_start = counts_.num_tokens,
        .flags = flags,
        .num_drafts = 0,
    };
    if ((flags & wire::kSeqFlagChunk) == 0) ++counts_.num_decodes;
    int32_t* const tokens = region<int32_t>(layout_.token_ids) + counts_.num_tokens;
    std::memcpy(tokens, known.data(), known.size_bytes());
    if (known.size() != num_tokens.value) tokens[known.size()] = wire::kNoToken;
    counts_.num_tokens += num_tokens.value;
  }

  // One token that samples the next one; kNoToken: it is relayed.
  struct Decode {
    RowId row;
    TokenCount position;
    int32_t token;
  };

  // The same for `count` decodes: next(i) is asked for each, in order.
  template <typename Next>
  void schedule_decodes(size_t count, Next next) {
    assert(counts_.num_seqs + count <= capacities_.max_rows);
    assert(counts_.num_tokens + count <= capacities_.max_step_tokens);
    wire::SeqEntry* const seqs = region<wire::SeqEntry>(layout_.seqs) + counts_.num_seqs;
    int32_t* const tokens = region<int32_t>(layout_.token_ids) + counts_.num_tokens;
    for (uint32_t i = 0; i < count; ++i) {
      const Decode decode = next(i);
      seqs[i] = {
          .row = decode.row.value,
          .position = decode.position.value,
          .num_tokens = 1,
          .token_start = counts_.num_tokens + i,
          .flags = wire::kSeqFlagSamples,
          .num_drafts = 0,
      };
      tokens[i] = decode.token;
    }
    counts_.num_seqs += static_cast<uint32_t>(count);
    counts_.num_decodes += static_cast<uint32_t>(count);
    counts_.num_tokens += static_cast<uint32_t>(count);
  }

  bool is_empty() const {
    return counts_.num_seqs == 0 && counts_.num_closes == 0 && counts_.num_copies == 0 && counts_.num_swap_outs == 0;
  }

  // The data plane makes so many decode steps of this one.
  void set_substeps(uint32_t num_substeps) { num_substeps_ = num_substeps; }

  // The slot is complete: its header.
  void finish(StepSeq step, Nanos now) {
    counts_.step = step.value;
    counts_.sent_ns = now.value;
    counts_.num_substeps = num_substeps_;
    *region<wire::StepHeader>(layout_.header) = counts_;
  }

 private:
  template <typename T>
  T* region(uint64_t offset) const {
    return reinterpret_cast<T*>(slot_ + offset);
  }

  std::byte* slot_;
  wire::StepSlotLayout layout_;
  const wire::Capacities& capacities_;
  wire::StepHeader counts_{};
  uint32_t num_substeps_ = 1;
};

}  // namespace twinplane::core
