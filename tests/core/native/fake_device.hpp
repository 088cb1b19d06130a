// A data plane for native tests: executes steps on KV slots that hold (position, token), and answers with a hash of the
// tokens it reads back through the block table. Any wrong position, table entry, relay or reused block ends in a wrong
// token.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <span>
#include <vector>

#include "control_plane/core/config.hpp"
#include "shared/csrc/wire.hpp"

namespace twinplane::core::testing {

#define REQUIRE(condition, ...)                                            \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fputc('\n', stderr);                                            \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

inline constexpr uint32_t kVocab = 40;

// FNV-1a over the tokens so far.
inline int32_t next_token(std::span<const int32_t> tokens) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const int32_t token : tokens) hash = (hash ^ static_cast<uint32_t>(token)) * 0x100000001b3ull;
  return static_cast<int32_t>((hash >> 20) % kVocab);
}

// What a request gets, had it the device for itself: up to and including `eos`, or max_tokens.
inline std::vector<int32_t> expected_output(std::vector<int32_t> tokens, uint32_t max_tokens, int32_t eos) {
  std::vector<int32_t> output;
  while (output.size() < max_tokens && (output.empty() || output.back() != eos)) {
    tokens.push_back(next_token(tokens));
    output.push_back(tokens.back());
  }
  return output;
}

class FakeDevice {
 public:
  FakeDevice(const Pool& pool, const wire::Capacities& capacities)
      : step_layout_(capacities),
        result_layout_(capacities),
        block_size_(pool.block_size.value),
        kv_(uint64_t{pool.num_blocks.value} * block_size_, {~0u, -1}) {}

  uint64_t result_bytes() const { return result_layout_.bytes; }

  // Executes the next substep of the step; writes its result slot. `interrupted`: steps below this number end with it.
  // True if it was the step's last: the next call then begins another one.
  bool run(const std::byte* step, std::byte* result, uint64_t interrupted = 0) {
    const auto& header = *at<wire::StepHeader>(step, step_layout_.header);
    if (substep_ == 0) apply(step, header);
    auto& out = *reinterpret_cast<wire::ResultHeader*>(result + result_layout_.header);
    out = {.step = header.step,
           .received_ns = 0,
           .finished_ns = 1,
           .apply_us = 0,
           .forward_us = 0,
           .sample_us = 0,
           .status = wire::kStepStatusOk,
           .num_entries = 0,
           .last = 1,
           .num_candidates = 0,
           .substep = substep_};
    if (substep_ == 0) {
      begin(step, header, out, result);
    } else {
      std::vector<GoingOn> rows;
      rows.swap(going_on_);
      for (const GoingOn& next : rows)
        slot(rows_.at(next.row), next.position) = {next.position, rows_.at(next.row).last_token};
      for (const GoingOn& next : rows) answer(next.row, next.position + 1, out, result);
    }
    ++substep_;
    out.last = substep_ == header.num_substeps || going_on_.empty() || interrupted > header.step;
    if (out.last != 0) substep_ = 0;
    return out.last != 0;
  }

 private:
  struct Slot {
    uint32_t position;
    int32_t token;
  };
  struct Row {
    std::map<uint32_t, uint32_t> table;
    int32_t last_token = wire::kNoToken;
    uint32_t num_candidates = 0;
    uint32_t limit = 0;
    uint32_t stops_from = 0;
    std::vector<uint32_t> stops;
  };
  struct GoingOn {
    uint32_t row;
    uint32_t position;  // of its last token
  };

  void apply(const std::byte* step, const wire::StepHeader& header) {
    const auto* closes = at<uint32_t>(step, step_layout_.closes);
    for (uint32_t i = 0; i < header.num_closes; ++i) REQUIRE(rows_.erase(closes[i]) == 1, "row %u", closes[i]);
    const auto* opens = at<wire::RowOpen>(step, step_layout_.opens);
    for (uint32_t i = 0; i < header.num_opens; ++i) {
      Row row;
      row.num_candidates = opens[i].num_candidates;
      row.limit = opens[i].limit;
      REQUIRE(rows_.emplace(opens[i].row, row).second, "row %u opened twice", opens[i].row);
    }
    const auto* words = at<uint32_t>(step, step_layout_.extras);
    for (uint32_t i = 0; i < header.num_extra_words; i += 3 + words[i + 2]) {
      if (words[i + 1] != wire::kExtraKindStopTokens) continue;
      Row& row = rows_.at(words[i]);
      row.stops_from = words[i + 3];
      row.stops.assign(words + i + 4, words + i + 3 + words[i + 2]);
    }
    const auto* writes = at<wire::TableWrite>(step, step_layout_.table_writes);
    for (uint32_t i = 0; i < header.num_table_writes; ++i) {
      rows_.at(writes[i].row).table[writes[i].index] = writes[i].block;
    }
    const auto* forks = at<wire::RowFork>(step, step_layout_.forks);
    for (uint32_t i = 0; i < header.num_forks; ++i) {
      for (uint32_t b = 0; b < forks[i].num_blocks; ++b) {
        rows_.at(forks[i].row).table[b] = rows_.at(forks[i].parent).table.at(b);
      }
    }
    const auto* copies = at<wire::BlockCopy>(step, step_layout_.copies);
    for (uint32_t i = 0; i < header.num_copies; ++i) {
      std::copy_n(kv_.begin() + uint64_t{copies[i].source} * block_size_, block_size_,
                  kv_.begin() + uint64_t{copies[i].target} * block_size_);
    }
  }

  void begin(const std::byte* step, const wire::StepHeader& header, wire::ResultHeader& out, std::byte* result) {
    REQUIRE(header.num_substeps == 1 || (header.num_substeps > 1 && header.num_decodes == header.num_seqs),
            "%u substeps, %u decodes of %u", header.num_substeps, header.num_decodes, header.num_seqs);
    const auto* seqs = at<wire::SeqEntry>(step, step_layout_.seqs);
    const auto* tokens = at<int32_t>(step, step_layout_.token_ids);
    going_on_.clear();
    // All KV of a step is written before any is read.
    for (uint32_t i = 0; i < header.num_seqs; ++i) {
      store(rows_.at(seqs[i].row), seqs[i], tokens + seqs[i].token_start);
    }
    for (uint32_t i = 0; i < header.num_seqs; ++i) {
      if ((seqs[i].flags & wire::kSeqFlagSamples) == 0) continue;
      answer(seqs[i].row, seqs[i].position + seqs[i].num_tokens, out, result);
    }
  }

  // The token at position `past` of a row.
  void answer(uint32_t number, uint32_t past, wire::ResultHeader& out, std::byte* result) {
    auto* entries = reinterpret_cast<wire::ResultEntry*>(result + result_layout_.entries);
    auto* candidates = reinterpret_cast<wire::Candidate*>(result + result_layout_.candidates);
    Row& row = rows_.at(number);
    row.last_token = sample(row, past);
    entries[out.num_entries++] = {.row = number, .token = row.last_token, .logprob = -1, .rank = 1, .flags = 0};
    for (uint32_t c = 0; c < row.num_candidates; ++c) {
      candidates[out.num_candidates++] = {(row.last_token + static_cast<int32_t>(c * c)) % 50,
                                          -0.1f * static_cast<float>(c + 1)};
    }
    const bool stops =
        past >= row.stops_from && std::ranges::count(row.stops, static_cast<uint32_t>(row.last_token)) != 0;
    if (!stops && past + 1 < row.limit) going_on_.push_back({number, past});
  }

  template <typename T>
  static const T* at(const std::byte* slot, uint64_t offset) {
    return reinterpret_cast<const T*>(slot + offset);
  }

  Slot& slot(const Row& row, uint32_t position) {
    return kv_[uint64_t{row.table.at(position / block_size_)} * block_size_ + position % block_size_];
  }

  void store(Row& row, const wire::SeqEntry& seq, const int32_t* tokens) {
    for (uint32_t i = 0; i < seq.num_tokens; ++i) {
      const bool is_relay = tokens[i] == wire::kNoToken;
      REQUIRE(!is_relay || (i + 1 == seq.num_tokens && row.last_token >= 0), "relay in row %u", seq.row);
      slot(row, seq.position + i) = {seq.position + i, is_relay ? row.last_token : tokens[i]};
    }
  }

  int32_t sample(const Row& row, uint32_t past) {
    std::vector<int32_t> context(past);
    for (uint32_t p = 0; p < past; ++p) {
      const Slot& s = slot(row, p);
      REQUIRE(s.position == p, "position %u holds %u", p, s.position);
      context[p] = s.token;
    }
    return next_token(context);
  }

  wire::StepSlotLayout step_layout_;
  wire::ResultSlotLayout result_layout_;
  uint32_t block_size_;
  std::vector<Slot> kv_;
  std::map<uint32_t, Row> rows_;
  uint32_t substep_ = 0;           // of the step under way
  std::vector<GoingOn> going_on_;  // its rows that have not ended
};

}  // namespace twinplane::core::testing
