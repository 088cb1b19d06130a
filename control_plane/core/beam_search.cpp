#include "control_plane/core/beam_search.hpp"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <utility>

#include "control_plane/core/request.hpp"

namespace twinplane::core {

BeamSearch::BeamSearch(const BeamParams& params, size_t num_stops, TokenCount max_tokens)
    : params_(params),
      kept_(std::max<uint32_t>(2, 1 + static_cast<uint32_t>(num_stops)) * params.width),
      max_tokens_(max_tokens),
      given_(size_t{params.width} * kept_),
      has_given_(params.width, 0),
      scores_(params.width, 0.0f),
      ranks_(params.width, 0),
      moved_from_(params.width, kStays) {
  continuations_.reserve(given_.size());
  children_.reserve(params.width);
  finished_.reserve(params.width + 1);
  for (uint32_t slot = params.width + 1; slot-- > 0;) free_slots_.push_back(slot);
  finished_tokens_ = std::make_unique_for_overwrite<int32_t[]>(size_t{params.width + 1} * max_tokens.value);
}

void BeamSearch::give(uint32_t beam, std::span<const wire::Candidate> candidates) {
  assert(candidates.size() == kept_ && has_given_[beam] == 0);
  std::ranges::copy(candidates, given_.begin() + static_cast<std::ptrdiff_t>(size_t{beam} * kept_));
  has_given_[beam] = 1;
  ++num_given_;
}

void BeamSearch::forget_given() {
  std::ranges::fill(has_given_, 0);
  num_given_ = 0;
}

void BeamSearch::forget_moves() {
  std::ranges::fill(moved_from_, kStays);
  has_moves_ = false;
}

float BeamSearch::penalized(float score, uint32_t length) const {
  return score / static_cast<float>(std::pow(static_cast<double>(length), static_cast<double>(params_.length_penalty)));
}

// The best continuations of all beams, best first; among equals the one of the better beam, then the lower token.
void BeamSearch::collect() {
  continuations_.clear();
  for (uint32_t beam = 0; beam < width(); ++beam) {
    if (has_given_[beam] == 0) continue;
    for (uint32_t i = 0; i < kept_; ++i) {
      const wire::Candidate& candidate = given_[size_t{beam} * kept_ + i];
      continuations_.push_back({beam, candidate.token, candidate.logprob + scores_[beam]});
    }
  }
  const auto end = continuations_.begin() + kept_;
  std::partial_sort(continuations_.begin(), end, continuations_.end(), [this](const Child& a, const Child& b) {
    if (a.score != b.score) return a.score > b.score;
    return a.parent != b.parent ? ranks_[a.parent] < ranks_[b.parent] : a.token < b.token;
  });
  continuations_.resize(kept_);
}

bool BeamSearch::select(std::span<Sequence* const> members) {
  assert(is_complete());
  collect();
  const uint32_t length = members[0]->emitted().value + 1;  // of the continuations
  const bool is_last = length == max_tokens_.value;
  const bool is_full = finished_.size() == width();
  const bool takes_more = can_improve_ && !(is_full && params_.early_stopping == EarlyStopping::kAtOnce);
  children_.clear();
  bool all_end = true;
  for (uint32_t i = 0; i < kept_; ++i) {
    const Child& child = continuations_[i];
    const bool ends = is_last || members[child.parent]->is_stop(child.token, {length});
    all_end &= ends;
    if (!ends) {
      if (children_.size() < width()) children_.push_back(child);
    } else if (i < width() && takes_more) {
      const bool is_by_length = !members[child.parent]->is_stop(child.token, {length});
      finish(child, *members[child.parent], length, is_by_length);
    }
  }
  forget_given();
  const bool has_all = finished_.size() == width();
  if (has_all && !children_.empty()) {
    const bool looks_ahead = params_.early_stopping == EarlyStopping::kNever && params_.length_penalty > 0.0f;
    const float best = penalized(children_[0].score, looks_ahead ? max_tokens_.value : length);
    can_improve_ = can_improve_ && best > finished_.back().score;
  }
  if (all_end || !can_improve_ || (has_all && params_.early_stopping == EarlyStopping::kAtOnce)) return false;
  place_children(members);
  is_spread_ = true;
  return true;
}

// The list keeps the best `width`; among equals the earlier one.
void BeamSearch::finish(const Child& child, const Sequence& parent, uint32_t length, bool is_by_length) {
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  int32_t* const tokens = finished_tokens_.get() + size_t{slot} * max_tokens_.value;
  std::copy_n(parent.tokens + parent.prompt_tokens.value, length - 1, tokens);
  tokens[length - 1] = child.token;
  const Hypothesis hypothesis{penalized(child.score, length), length, slot, is_by_length};
  const auto at = std::upper_bound(finished_.begin(), finished_.end(), hypothesis,
                                   [](const Hypothesis& a, const Hypothesis& b) { return a.score > b.score; });
  finished_.insert(at, hypothesis);
  if (finished_.size() > width()) {
    free_slots_.push_back(finished_.back().slot);
    finished_.pop_back();
  }
}

// A beam's best child stays in its slot; the others go where nobody's child is.
void BeamSearch::place_children(std::span<Sequence* const> members) {
  assert(children_.size() == width());
  forget_moves();
  std::vector<uint8_t>& is_taken = has_given_;  // free here, and as long
  std::ranges::fill(is_taken, 0);
  for (const Child& child : children_) is_taken[child.parent] = 1;  // a parent's tokens must be there to be copied
  const auto copy_tokens = [&](uint32_t slot, const Child& child) {
    Sequence& sequence = *members[slot];
    const Sequence& parent = *members[child.parent];
    const uint32_t prompt = sequence.prompt_tokens.value;
    std::copy_n(parent.tokens + prompt, parent.num_tokens.value - prompt, sequence.tokens + prompt);
    sequence.num_tokens = parent.num_tokens;
    moved_from_[slot] = child.parent;
    has_moves_ = true;
  };
  const auto settle = [&](uint32_t slot, size_t rank) {
    scores_[slot] = children_[rank].score;
    ranks_[slot] = static_cast<uint32_t>(rank);
    members[slot]->push(children_[rank].token);
  };
  // First those that move: a parent still ends where it did.
  uint32_t slot = 0;
  for (size_t i = 0; i < children_.size(); ++i) {
    const Child& child = children_[i];
    const bool is_first = std::none_of(children_.begin(), children_.begin() + static_cast<std::ptrdiff_t>(i),
                                       [&](const Child& other) { return other.parent == child.parent; });
    if (is_first) continue;
    while (is_taken[slot] != 0) ++slot;
    is_taken[slot] = 1;
    copy_tokens(slot, child);
    settle(slot, i);
  }
  std::ranges::fill(is_taken, 0);
  for (size_t i = 0; i < children_.size(); ++i) {
    const uint32_t parent = children_[i].parent;
    if (std::exchange(is_taken[parent], uint8_t{1}) == 0) settle(parent, i);
  }
  std::ranges::fill(is_taken, 0);
}

BeamSearch::Finished BeamSearch::finished(uint32_t place) const {
  const Hypothesis& hypothesis = finished_[place];
  const int32_t* const tokens = finished_tokens_.get() + size_t{hypothesis.slot} * max_tokens_.value;
  return {hypothesis.score, hypothesis.length, {tokens, hypothesis.length}, hypothesis.is_by_length};
}

}  // namespace twinplane::core
