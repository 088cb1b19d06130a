// What a step costs: a linear model of its time, learned online from the steps that were.
//
// Time is taken to be a sum of non-negative costs, one per feature of StepLoad. Observations are kept as the normal
// equations of a least-squares fit with exponential forgetting; a step with prompt chunks and one without are two
// kinds with a memory each, so an hour without prompts forgets nothing of what prompts cost. Errors count relative to
// the step's time. The fit leans on a slow prior where nothing is known yet.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "control_plane/core/types.hpp"

namespace twinplane::core {

// What one step computes, as far as its time depends on it.
struct StepLoad {
  uint32_t decodes = 0;         // sequences that get their one token
  uint32_t chunks = 0;          // sequences with prompt tokens
  uint32_t chunk_tokens = 0;    // of these
  uint64_t decode_context = 0;  // KV positions the decodes read, summed
  uint64_t chunk_pairs = 0;     // (query, key) pairs of the chunks' attention: n tokens behind c make n * (c + (n+1)/2)
  uint32_t swaps = 0;           // blocks moved between the two pools, either way

  void add_decode(uint32_t context) {
    ++decodes;
    decode_context += context;
  }
  void add_chunk(uint32_t tokens, uint32_t context) {
    ++chunks;
    chunk_tokens += tokens;
    chunk_pairs += uint64_t{tokens} * context + uint64_t{tokens} * (tokens + 1) / 2;
  }
};

class CostModel {
 public:
  // Expected time, in microseconds.
  double predict_us(const StepLoad& load) const;

  // So many times the expected one is what 99 % of the steps with prompt chunks stay below.
  double margin() const { return kinds_[kMixed].margin(); }

  // The most prompt tokens behind `context` computed ones by which `load` may grow so that P99 of its time stays
  // within `limit_us`. 0 if not even one fits.
  uint32_t affordable(const StepLoad& load, uint32_t context, double limit_us) const;

  // Expected time of a prompt that has the device for itself, `step_tokens` of it in each step, in microseconds.
  double prefill_us(uint32_t tokens, uint32_t computed, uint32_t step_tokens) const;

  // The same of a prompt whose chunks ride on steps that run anyway: without what every step costs.
  double recompute_us(uint32_t tokens, uint32_t computed, uint32_t step_tokens) const;

  // Enough steps with prompt chunks were seen, and they went about as predicted: what is refused on this model's word
  // is refused for a reason.
  bool is_trusted() const;

  // What moving so many blocks one way between the two pools takes, in microseconds.
  double swap_us(BlockCount blocks) const;

  // Before the first step: what moving one block one way takes, as the data plane measured it. Steps that swap may say
  // otherwise later.
  void expect_swap_us(double us);

  // A step took so long. Times that are none (zero, negative, NaN) are not taken.
  void observe(const StepLoad& load, double measured_us);

 private:
  static constexpr size_t kFeatures = 7;
  using Vector = std::array<double, kFeatures>;

  enum KindIndex : size_t { kDecodesOnly, kMixed, kNumKinds };

  // Steps of one kind: their normal equations, and how far measurements scatter around predictions.
  struct Kind {
    double margin() const { return 1.0 + sigmas * spread; }

    std::array<Vector, kFeatures> squares{};  // sum of x x^T; the lower triangle
    Vector products{};                        // sum of x y
    double spread = 0.3;                      // standard deviation of measured / predicted
    double sigmas = 2.5;                      // 99 % of the steps lie below so many deviations
    uint64_t seen = 0;
    uint32_t surprises = 0;  // in a row
  };

  // Microseconds per unit of each feature on a slow device (250 prompt tokens a second), in the order of Feature.
  static constexpr Vector kPrior = {5'000, 2'000, 1, 1'000, 4'000, 0.1, 1'000};

  Vector features(const StepLoad& load) const;
  double cost_us(size_t feature) const;
  bool is_free(size_t feature) const { return (free_ >> feature & 1) != 0; }
  void note_residual(Kind& kind, double residual);
  void solve();
  void minimize_over_free();

  std::array<Kind, kNumKinds> kinds_;
  Vector prior_ = kPrior;
  Vector costs_ = {1, 1, 1, 1, 1, 1, 1};   // of each feature, in multiples of the prior's; all >= 0
  uint32_t free_ = (1u << kFeatures) - 1;  // bit j: cost j is not held at zero
  uint64_t swaps_seen_ = 0;                // steps with some
  uint32_t widest_ = 0;                    // most chunk tokens of a step, lately
};

}  // namespace twinplane::core
