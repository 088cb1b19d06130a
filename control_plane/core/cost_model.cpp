#include "control_plane/core/cost_model.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace twinplane::core {
namespace {

enum Feature : size_t { kConstant, kDecodes, kDecodeContext, kChunks, kChunkTokens, kChunkPairs, kSwaps };

constexpr double kForgetting = 1.0 - 1.0 / 128;  // per step of a kind
constexpr double kPriorWeight = 1e-4;            // of the prior, beside 1 for a step
constexpr double kLeastPivot = 1e-9;             // what rounding may leave of a pivot that is none
constexpr double kFirstSpreadRate = 1.0 / 8;     // of the first steps
constexpr double kSpreadRate = 1.0 / 32;         // how fast the spread follows
constexpr double kLeastSpread = 0.02;            // clocks and schedulers are never better
constexpr double kOutlier = 4.0;                 // deviations; what lies beyond counts as this
constexpr double kSigmaRate = 0.2;               // step of the quantile's approximation (Robbins and Monro 1951)
constexpr double kQuantile = 0.99;
constexpr double kLeastSigmas = 1.0, kMostSigmas = 8.0;
constexpr uint32_t kSurprisesToForget = 4;  // so many in a row are no outliers: the device has changed
constexpr double kDiscount = 1.0 / 16;      // of all that was learned, then
constexpr uint64_t kSeenToTrust = 16;
constexpr uint64_t kSeenToSettle = 64;
constexpr uint64_t kSolveEvery = 4;
constexpr double kSpreadToTrust = 0.5;
// A step may carry so many times the chunk tokens of the widest one seen lately: the line is not followed far beyond
// its data. Lately: each step with prompt chunks takes 1 / kNarrowing off.
constexpr double kWidening = 2.0;
constexpr uint32_t kNarrowing = 16;
constexpr uint32_t kFirstWidth = 16;

}  // namespace

// In units of the prior's costs, which differ by orders of magnitude: what is learned is how many times as dear as the
// prior each feature is.
CostModel::Vector CostModel::features(const StepLoad& load) const {
  Vector x = prior_;
  x[kDecodes] *= load.decodes;
  x[kDecodeContext] *= static_cast<double>(load.decode_context);
  x[kChunks] *= load.chunks;
  x[kChunkTokens] *= load.chunk_tokens;
  x[kChunkPairs] *= static_cast<double>(load.chunk_pairs);
  x[kSwaps] *= load.swaps;
  return x;
}

double CostModel::cost_us(size_t feature) const { return costs_[feature] * prior_[feature]; }

double CostModel::predict_us(const StepLoad& load) const {
  const Vector x = features(load);
  double sum = 0;
  for (size_t j = 0; j < kFeatures; ++j) sum += costs_[j] * x[j];
  return sum;
}

uint32_t CostModel::affordable(const StepLoad& load, uint32_t context, double limit_us) const {
  const double widest = kWidening * std::max(widest_, kFirstWidth) - load.chunk_tokens;
  const double rest = limit_us / margin() - predict_us(load) - cost_us(kChunks);
  if (rest <= 0 || widest <= 0) return 0;
  // One more chunk of n tokens costs pair/2 n^2 + linear n; the positive root, in the form that allows pair = 0.
  const double pair = cost_us(kChunkPairs);
  const double linear = cost_us(kChunkTokens) + pair * (context + 0.5);
  const double divisor = linear + std::sqrt(linear * linear + 2 * pair * rest);
  const double tokens = divisor > 0 ? std::min(2 * rest / divisor, widest) : widest;
  return static_cast<uint32_t>(std::min(tokens, 1e9));
}

double CostModel::prefill_us(uint32_t tokens, uint32_t computed, uint32_t step_tokens) const {
  const uint32_t steps = (tokens + step_tokens - 1) / step_tokens;
  return recompute_us(tokens, computed, step_tokens) + steps * cost_us(kConstant);
}

double CostModel::recompute_us(uint32_t tokens, uint32_t computed, uint32_t step_tokens) const {
  StepLoad load;
  load.add_chunk(tokens, computed);
  load.chunks = (tokens + step_tokens - 1) / step_tokens;
  return predict_us(load) - cost_us(kConstant);
}

bool CostModel::is_trusted() const {
  const Kind& mixed = kinds_[kMixed];
  return mixed.seen >= kSeenToTrust && mixed.spread <= kSpreadToTrust;
}

double CostModel::swap_us(BlockCount blocks) const { return blocks.value * cost_us(kSwaps); }

void CostModel::expect_swap_us(double us) { prior_[kSwaps] = us; }

void CostModel::observe(const StepLoad& load, double measured_us) {
  if (!(measured_us > 0)) return;
  Kind& kind = kinds_[load.chunks != 0 ? kMixed : kDecodesOnly];
  const double expected = std::max(predict_us(load), 1e-3);
  const double residual = measured_us / expected - 1;
  // Early on the prior's errors are taken as they are; later a step that is far off moves the fit by a bounded amount.
  // So are those of the first steps that swap, which may come late.
  const bool is_learning = kind.seen < kSeenToTrust || (load.swaps != 0 && swaps_seen_ < kSeenToTrust);
  const double bound = kOutlier * kind.spread;
  const double y = is_learning ? measured_us : expected * (1 + std::clamp(residual, -bound, bound));
  note_residual(kind, residual);
  if (load.swaps != 0) ++swaps_seen_;

  const Vector x = features(load);
  // Relative errors count: without this, the longest steps alone would decide. The larger of the two, so that a first
  // step ten times too long (caches, page faults) has little weight.
  const double weight = 1 / (std::max(expected, y) * std::max(expected, y));
  for (size_t j = 0; j < kFeatures; ++j) {
    for (size_t k = 0; k <= j; ++k) {
      kind.squares[j][k] = kForgetting * kind.squares[j][k] + weight * x[j] * x[k];
    }
    kind.products[j] = kForgetting * kind.products[j] + weight * x[j] * y;
  }
  if (load.chunks != 0) widest_ = std::max(load.chunk_tokens, widest_ - widest_ / kNarrowing);
  // Once much is known, one step more moves the fit by a hundredth: not worth solving after each.
  if (++kind.seen < kSeenToSettle || kind.seen % kSolveEvery == 0) solve();
}

// Spread and quantile of measured / predicted, and whether the device is still the one that was learned.
void CostModel::note_residual(Kind& kind, double residual) {
  const double bound = kOutlier * kind.spread;
  const double clipped = std::clamp(residual, -bound, bound);
  const bool is_above = residual > kind.sigmas * kind.spread;
  kind.sigmas += kSigmaRate * (is_above ? kQuantile : kQuantile - 1);
  kind.sigmas = std::clamp(kind.sigmas, kLeastSigmas, kMostSigmas);
  const double rate = kind.seen < kSeenToTrust ? kFirstSpreadRate : kSpreadRate;
  const double variance = (1 - rate) * kind.spread * kind.spread + rate * clipped * clipped;
  kind.spread = std::max(std::sqrt(variance), kLeastSpread);

  kind.surprises = std::abs(residual) > bound ? kind.surprises + 1 : 0;
  if (kind.surprises < kSurprisesToForget) return;
  for (Kind& each : kinds_) {
    each.surprises = 0;
    each.seen = 0;
    for (Vector& row : each.squares) {
      for (double& square : row) square *= kDiscount;
    }
    for (double& product : each.products) product *= kDiscount;
  }
}

// Non-negative least squares by an active set (Lawson and Hanson 1974, ch. 23), begun where the last one ended: nearly
// always one pass.
void CostModel::solve() {
  for (;;) {
    minimize_over_free();
    const auto least = std::ranges::min_element(costs_);
    if (*least >= 0) break;
    free_ &= ~(1u << (least - costs_.begin()));
  }
  // What is held at zero is let go of if that lowers the error; it takes part from the next step on.
  for (size_t j = 0; j < kFeatures; ++j) {
    if (is_free(j)) continue;
    double gradient = -kPriorWeight;
    for (const Kind& kind : kinds_) {
      gradient -= kind.products[j];
      for (size_t k = 0; k < kFeatures; ++k) gradient += kind.squares[std::max(j, k)][std::min(j, k)] * costs_[k];
    }
    if (gradient < 0) free_ |= 1u << j;
  }
}

// The costs with the least error, of those whose held members are zero: the normal equations by Cholesky.
void CostModel::minimize_over_free() {
  std::array<Vector, kFeatures> lower{};
  Vector inverse{};  // of the diagonal; zero takes a held member out of everything
  Vector y{};
  for (size_t j = 0; j < kFeatures; ++j) {
    for (size_t k = 0; k <= j; ++k) {
      double sum = kinds_[0].squares[j][k] + kinds_[1].squares[j][k];
      for (size_t i = 0; i < k; ++i) sum -= lower[j][i] * lower[k][i];
      if (j != k) {
        lower[j][k] = sum * inverse[k];
      } else if (is_free(j)) {
        inverse[j] = 1 / std::sqrt(std::max(sum + kPriorWeight, kLeastPivot));
      }
    }
    double sum = kinds_[0].products[j] + kinds_[1].products[j] + kPriorWeight;
    for (size_t i = 0; i < j; ++i) sum -= lower[j][i] * y[i];
    y[j] = sum * inverse[j];
  }
  for (size_t j = kFeatures; j-- != 0;) {
    double sum = y[j];
    for (size_t i = j + 1; i < kFeatures; ++i) sum -= lower[i][j] * costs_[i];
    costs_[j] = sum * inverse[j];
  }
}

}  // namespace twinplane::core
