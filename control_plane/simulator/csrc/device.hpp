// How long a step takes on a device.
#pragma once

#include <cmath>
#include <cstdint>

#include "control_plane/core/types.hpp"
#include "control_plane/simulator/csrc/curve.hpp"

namespace twinplane::simulator {

// What one step asks of the device.
struct Work {
  uint32_t tokens = 0;          // that go through the model: decodes and chunks (and padding, where a system pads)
  uint32_t sequences = 0;       // rows of the batch
  uint64_t context_tokens = 0;  // KV entries read: each sequence's context once
  uint64_t chunk_pairs = 0;     // (query, key) pairs of the chunks' attention, which is bound by arithmetic
  uint32_t swapped_blocks = 0;  // moved between the device and the host, either way, before the model runs
  bool is_substep = false;      // the device goes on by itself: the host has nothing to plan

  // A sequence with `position` computed tokens takes `count` more.
  void add(uint32_t position, uint32_t count) {
    tokens += count;
    ++sequences;
    context_tokens += position + count;
    if (count > 1) chunk_pairs += uint64_t{count} * position + uint64_t{count} * (count + 1) / 2;
  }
};

// time = fixed + by_tokens(tokens) + sequences * per_sequence + context_tokens * per_context_token
//        + chunk_pairs * per_pair + swapped_blocks * per_swapped_block, all in nanoseconds. Of each substep, if a step
//        has
// several.
struct Device {
  Curve by_tokens_ns;  // the model itself: weights, then arithmetic
  double fixed_ns = 0;
  double per_sequence_ns = 0;
  double per_context_token_ns = 0;
  double per_pair_ns = 0;
  double per_swapped_block_ns = 0;

  // A step without tokens runs no model.
  core::Nanos time(const Work& work) const {
    const double swaps = per_swapped_block_ns * work.swapped_blocks;
    if (work.tokens == 0) return {static_cast<uint64_t>(std::llround(swaps))};
    const double once = fixed_ns + by_tokens_ns(work.tokens) + per_sequence_ns * work.sequences +
                        per_context_token_ns * static_cast<double>(work.context_tokens) +
                        per_pair_ns * static_cast<double>(work.chunk_pairs);
    return {static_cast<uint64_t>(std::llround(swaps + once))};
  }
};

}  // namespace twinplane::simulator
