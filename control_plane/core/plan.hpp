// A pass's first half: decide everything about the next step, change nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "control_plane/core/budget.hpp"
#include "control_plane/core/cost_model.hpp"
#include "control_plane/core/state.hpp"
#include "control_plane/core/turns.hpp"

namespace twinplane::core {

struct Scheduled {
  Sequence* sequence;
  TokenCount tokens;  // to compute in this step, from num_computed on
};

// Waits, and can not reach its first token before its deadline: its prompt takes so long.
struct Hopeless {
  Sequence* sequence;
  Nanos estimate;
};

// What commit is to do, in this order.
struct StepPlan {
  explicit StepPlan(uint32_t max_rows) : yields(max_rows) {
    yielding.reserve(max_rows);
    entering.reserve(max_rows);
    plain.reserve(max_rows);
    decodes.reserve(max_rows);
    chunks.reserve(max_rows);
  }

  void clear() {
    yielding.clear();
    yields.clear();
    entering.clear();
    plain.clear();
    decodes.clear();
    chunks.clear();
    moves_beams = false;
    num_substeps = 1;
  }

  size_t num_decodes() const { return plain.size() + decodes.size(); }
  template <typename Visit>
  void for_each_decode(Visit visit) const {
    for (Sequence* const sequence : plain) visit(*sequence);
    for (const Scheduled& decode : decodes) visit(*decode.sequence);
  }

  std::vector<Sequence*> yielding;  // to be preempted
  BitSet yields;                    // the same, by place in the running line
  std::vector<Sequence*> entering;  // of the plain decodes: those that get a new block first
  std::vector<Sequence*> plain;     // decodes that are alone and behind their prompt, as nearly all are: one token each
  std::vector<Scheduled> decodes;   // the others; a new block if the last one is full
  std::vector<Scheduled> chunks;    // of sequences that are resident
  bool moves_beams = false;         // among the other decodes are beams that change hands first
  uint32_t num_substeps = 1;        // tokens each decode gets, of one step; above 1 the plan is for an idle device
};

// What it takes to let a sequence, or a group, in.
struct Need {
  BlockCount blocks;
  WordCount words;
  uint32_t rows = 1;
  uint32_t swaps = 0;    // blocks to come back from the host
  bool is_ready = true;  // no step in flight names one of them
};

// Who becomes resident next, with what the cache has of it, and its first chunk.
struct Admission {
  Sequence* sequence;
  Match match;
  TokenCount tokens;
  size_t overtakes;  // so many who stand before it in the line, and are its equals
};

// Deterministic: the same state gives the same plan. A pass begins with plan(), which is carried out before the first
// admission is asked for; and each admission before the next, because it changes what is free and what the prefix tree
// knows: the second of two equal prompts finds the first one's blocks.
class Planner {
 public:
  explicit Planner(uint32_t max_rows) : plan_(max_rows) {
    behind_.reserve(max_rows);
    hopeless_.reserve(max_rows);
    looks_.reserve(kMaxLooks);
  }

  // What those on the device do. Valid until the next call.
  const StepPlan& plan(const State& state);

  // The next waiting sequence to come in; nullopt if none does in this step.
  std::optional<Admission> next_admission(const State& state);

  // Of those asked about so far: to be ended when the pass is over.
  const std::vector<Hopeless>& hopeless() const { return hopeless_; }
  const StepLoad& load() const { return budget_->load(); }         // what was dealt adds up to
  TokenCount chunk_allowance() const { return chunk_allowance_; }  // prompt tokens the step had room for

 private:
  static constexpr size_t kMaxLooks = 16;

  void deal_to_decodes(const State& state, class Residency& residency);
  static bool get_blocks(const State& state, Residency& residency, size_t begin, size_t end);
  static bool is_decode(const Sequence& sequence);
  static bool is_plain_decode(const Sequence& sequence);
  void deal_to(const State& state, size_t i);
  void deal_to_chunks(const State& state);

  // One who waits, and what it would come in with.
  struct Candidate {
    Sequence* sequence;
    Match match;
    TokenCount hit;  // tokens that it need not compute: cached, or saved in the host's pool
    Need need;
    Nanos estimate;  // of its prompt, if it is hopeless
  };
  enum class Verdict { kFits, kPassedOver, kHopeless, kNoRoom };
  Candidate look_at(const State& state, Sequence& sequence) const;
  Verdict judge(const State& state, Candidate& candidate) const;
  bool is_hopeless(const State& state, Candidate& candidate) const;
  void prefetch_upcoming(const State& state) const;
  size_t find_better_cached(const State& state, Candidate& chosen);
  TokenCount cached_of(const State& state, Sequence& sequence);

  StepPlan plan_;
  std::optional<Budget> budget_;  // what the step can still carry
  TokenCount chunk_allowance_;
  std::vector<Hopeless> hopeless_;
  bool is_short_ = false;  // somebody resident is short of memory: nobody else comes in
  Turns turns_;
  bool has_offered_ = false;  // the last candidate was offered, and has come in since
  uint32_t swapped_in_ = 0;   // blocks, by this step
  size_t passed_over_ = 0;    // candidates that could not come in, and held up nobody
  // What the cache has of newcomers that were looked at ahead of their turn, in this pass.
  struct Look {
    const Sequence* sequence;
    TokenCount cached;
  };
  std::vector<Look> looks_;
  // Scratch: the running sequences with more than one token to go, found while dealing to the decodes.
  std::vector<size_t> behind_;
};

}  // namespace twinplane::core
