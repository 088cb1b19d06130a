#include "kernels/cpu/sampling.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <span>
#include <vector>

#include "kernels/cpu/kernels.hpp"

namespace twinplane::kernels {
namespace {

// Weights are relative to the likeliest token's, at most 1. Those below the first threshold hardly ever matter; below
// the last one is what exp() makes of -inf and its like, which counts as nothing.
constexpr float kThresholds[] = {1e-3f, 1e-5f, 2e-38f};

// Sixteen buckets for each factor of 2 between weights, the heaviest first.
constexpr int kBucketShift = 64 - 32 + 19;
constexpr size_t kFirstBucket = (~0x3F800000u) >> 19;  // of weight 1
constexpr size_t kBuckets = (0x3F800000u >> 19) + 1;
size_t bucket_of(uint64_t key) { return static_cast<size_t>(key >> kBucketShift) - kFirstBucket; }

struct Bucket {
  size_t begin = 0;
  size_t end = 0;
  double sum = 0;
};

struct Scratch {
  std::vector<uint64_t> found;  // by id
  std::vector<uint64_t> keys;   // by bucket
  std::vector<Bucket> buckets = std::vector<Bucket>(kBuckets);
};

// A token in the descending order, and the weight of all up to and including it.
struct Place {
  size_t index;
  double cumulative;
};

// The tokens of a row in descending order of weight, found and sorted only where somebody looks: buckets are passed by
// their sums. Sums are float64 in an order that depends on the row alone.
class Descending {
 public:
  Descending(Scratch& scratch, const float* logits, int64_t vocab, float peak, float temperature, bool with_total)
      : scratch_(scratch), temperature_(temperature) {
    if (std::ssize(scratch.found) < vocab) {
      scratch.found.resize(static_cast<size_t>(vocab));
      scratch.keys.resize(static_cast<size_t>(vocab));
    }
    weighing_.logits = logits;
    weighing_.vocab = vocab;
    weighing_.peak = peak;
    weighing_.inverse_temperature = 1 / temperature;
    weighing_.keys = scratch.found.data();
    collect(with_total ? &total_ : nullptr);
  }

  // Of the whole vocabulary; only if asked for.
  double total() const { return total_; }

  // Number `count` - 1, or the last one there is.
  Place at_count(size_t count) {
    while (count_ < count && more()) {
    }
    count = std::min(count, count_);
    return place([&](const Bucket& bucket, double) { return bucket.end >= count; },
                 [&](size_t index, double) { return index + 1 == count; });
  }

  // The first one that `reached(cumulative)` holds for, or the last one there is.
  template <class Reached>
  Place at_sum(const Reached& reached) {
    while (!reached(sum_) && more()) {
    }
    return place([&](const Bucket&, double cumulative) { return reached(cumulative); },
                 [&](size_t, double cumulative) { return reached(cumulative); });
  }

  // The last one of at least this weight.
  Place at_weight(float least) {
    while (least < kThresholds[stage_] && more()) {
    }
    size_t count = 0;
    for (size_t i = 0; i < count_; ++i) count += key_weight(scratch_.found[i]) >= least ? 1 : 0;
    return at_count(std::max<size_t>(count, 1));
  }

  // Of the place looked at last.
  int32_t token(Place place) const { return static_cast<int32_t>(scratch_.keys[place.index] & 0xFFFFFFFFu); }

 private:
  // With the next lower threshold; false if there is none.
  bool more() {
    if (stage_ + 1 == std::size(kThresholds)) return false;
    ++stage_;
    collect(nullptr);
    return true;
  }

  void collect(double* total) {
    weighing_.threshold = kThresholds[stage_];
    // Below the logit of that weight by more than rounding can be wrong.
    weighing_.skip_below =
        weighing_.peak + temperature_ * std::log(weighing_.threshold) * 1.001f - std::abs(weighing_.peak) * 1e-5f;
    count_ = static_cast<size_t>(active().weigh(weighing_, total));
    distribute();
  }

  // Those that weights of at least the threshold fall into.
  std::span<Bucket> buckets() const {
    const size_t last = bucket_of(weight_key(kThresholds[stage_], 0));
    return {scratch_.buckets.data(), std::min(last + 1, kBuckets)};
  }

  // Counting sort of `found` into `keys` by bucket.
  void distribute() {
    const std::span<Bucket> buckets = this->buckets();
    std::fill(buckets.begin(), buckets.end(), Bucket{});
    for (size_t i = 0; i < count_; ++i) ++buckets[bucket_of(scratch_.found[i])].end;
    size_t begin = 0;
    for (Bucket& bucket : buckets) {
      const size_t size = bucket.end;
      bucket.begin = bucket.end = begin;
      begin += size;
    }
    sum_ = 0;
    for (size_t i = 0; i < count_; ++i) {
      const uint64_t key = scratch_.found[i];
      Bucket& bucket = buckets[bucket_of(key)];
      bucket.sum += static_cast<double>(key_weight(key));
      scratch_.keys[bucket.end++] = key;
    }
    for (const Bucket& bucket : buckets) sum_ += bucket.sum;
  }

  // The first token for which `here` holds, in the first bucket of which `in_bucket` says so; else the last one there
  // is.
  template <class InBucket, class Here>
  Place place(const InBucket& in_bucket, const Here& here) {
    double before = 0;
    const Bucket* last = nullptr;
    double before_last = 0;
    for (const Bucket& bucket : buckets()) {
      if (bucket.begin == bucket.end) continue;
      last = &bucket;
      before_last = before;
      before += bucket.sum;
      if (in_bucket(bucket, before)) break;
    }
    uint64_t* const keys = scratch_.keys.data();
    std::sort(keys + last->begin, keys + last->end);
    double cumulative = before_last;
    for (size_t i = last->begin; i < last->end; ++i) {
      cumulative += static_cast<double>(key_weight(keys[i]));
      if (here(i, cumulative)) return {i, cumulative};
    }
    return {last->end - 1, cumulative};
  }

  Scratch& scratch_;
  Weighing weighing_ = {};
  float temperature_;
  size_t stage_ = 0;  // of kThresholds
  size_t count_ = 0;  // tokens that reach it: at least the likeliest
  double sum_ = 0;    // their weight
  double total_ = 0;
};

}  // namespace

int32_t draw_token(const float* logits, int64_t vocab, const Draw& draw) {
  thread_local Scratch scratch;
  const float peak = active().greatest_logit(logits, vocab);
  if (!std::isfinite(peak)) return -1;
  const bool cut = draw.top_k > 0 && draw.top_k < vocab;
  const bool needs_total = !cut && (draw.top_p < 1 || draw.min_p <= 0);
  // At a lower temperature than this greedy is all that is left, and its inverse must be finite.
  Descending order(scratch, logits, vocab, peak, std::max(draw.temperature, 1e-30f), needs_total);
  Place last = {static_cast<size_t>(vocab) - 1, order.total()};  // of the kept tokens
  if (cut) last = order.at_count(static_cast<size_t>(draw.top_k));
  if (draw.top_p < 1) {  // the token that reaches top_p is kept: those before it sum to less
    const double target = static_cast<double>(draw.top_p) * last.cumulative;
    const Place reached = order.at_sum([&](double sum) { return sum >= target; });
    if (reached.index < last.index) last = reached;
  }
  if (draw.min_p > 0) {
    const Place above = order.at_weight(draw.min_p);
    if (above.index < last.index || !(last.cumulative > 0)) last = above;
  }
  const double target = static_cast<double>(draw.uniform) * last.cumulative;
  Place drawn = order.at_sum([&](double sum) { return sum > target; });
  if (drawn.index > last.index) drawn = order.at_count(last.index + 1);  // sums round differently
  return order.token(drawn);
}

float uniform(uint64_t seed, uint32_t stream, uint32_t position) {
  uint32_t counter[4] = {position, stream, 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter[0] = static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0];
    counter[1] = static_cast<uint32_t>(product1);
    counter[2] = static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1];
    counter[3] = static_cast<uint32_t>(product0);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return static_cast<float>(counter[0] >> 8) * 0x1p-24f;
}

}  // namespace twinplane::kernels
