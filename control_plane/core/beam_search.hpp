// Beam search over one group of sequences: which continuations live on, which are finished, when to stop. Pure
// arithmetic on candidates; what follows for blocks and rows is the scheduler's business.
//
// Rules and order of arithmetic (float32) are those of transformers' GenerationMixin._beam_search, so that both give
// the same beams: of all continuations the best (1 + number of stop tokens) * width are looked at (at least 2 * width);
// those that end enter the list of finished ones if they are among the best `width`; the best `width` others live on.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "control_plane/core/types.hpp"
#include "shared/csrc/wire.hpp"

namespace twinplane::core {

struct Sequence;

// When the search may stop before its beams have run out of room.
enum class EarlyStopping : uint8_t {
  kHeuristic = 0,  // the best beam, ended now, would not beat the worst finished one
  kAtOnce = 1,     // there are `width` finished ones
  kNever = 2,      // no beam can beat the worst finished one any more, whatever follows
};

struct BeamParams {
  uint32_t width = 0;  // 0: no beam search
  float length_penalty = 1.0f;
  EarlyStopping early_stopping = EarlyStopping::kHeuristic;
};

class BeamSearch {
 public:
  // `num_stops`: tokens that end a beam. Allocates all it will ever need.
  BeamSearch(const BeamParams& params, size_t num_stops, TokenCount max_tokens);

  uint32_t width() const { return params_.width; }
  uint32_t candidates_per_beam() const { return kept_; }

  // The candidates of one beam, likeliest first. Those of all beams make a selection.
  void give(uint32_t beam, std::span<const wire::Candidate> candidates);
  bool has_given(uint32_t beam) const { return has_given_[beam] != 0; }
  bool is_complete() const { return num_given_ == (is_spread_ ? width() : 1); }
  // All beams are being computed again: what they gave is void.
  void forget_given();

  // Before the first selection there is one beam, the first; after it there are `width`.
  bool is_spread() const { return is_spread_; }

  struct Child {
    uint32_t parent;
    int32_t token;
    float score;  // sum of log-probabilities
  };

  // Chooses the children and appends their tokens: afterwards members[i] holds a beam again, in the order of the slots
  // that need not change hands: a beam's best child stays in its slot, the others take the slots of beams without
  // children, and moved_from() tells from where. False once the search is over; then finished() has the results.
  bool select(std::span<Sequence* const> members);

  static constexpr uint32_t kStays = ~uint32_t{0};
  uint32_t moved_from(uint32_t beam) const { return moved_from_[beam]; }
  bool has_moves() const { return has_moves_; }
  void forget_moves();

  struct Finished {
    float score;  // sum of log-probabilities / length ** length_penalty
    uint32_t length;
    std::span<const int32_t> tokens;
    bool is_by_length;  // else by its last token
  };
  // Best first; `width` of them once the search is over.
  Finished finished(uint32_t place) const;

 private:
  struct Hypothesis {
    float score;
    uint32_t length;
    uint32_t slot;  // where its tokens lie
    bool is_by_length;
  };

  void collect();
  void finish(const Child& child, const Sequence& parent, uint32_t length, bool is_by_length);
  void place_children(std::span<Sequence* const> members);
  float penalized(float score, uint32_t length) const;

  const BeamParams params_;
  const uint32_t kept_;
  const TokenCount max_tokens_;
  std::vector<wire::Candidate> given_;  // [width][kept]
  std::vector<uint8_t> has_given_;
  uint32_t num_given_ = 0;
  bool is_spread_ = false;
  bool can_improve_ = true;
  std::vector<float> scores_;    // of the beams
  std::vector<uint32_t> ranks_;  // 0 = the best
  std::vector<Child> continuations_;
  std::vector<Child> children_;
  std::vector<uint32_t> moved_from_;
  bool has_moves_ = false;
  std::vector<Hypothesis> finished_;  // best first
  std::vector<uint32_t> free_slots_;
  std::unique_ptr<int32_t[]> finished_tokens_;  // [width][max_tokens]
};

}  // namespace twinplane::core
