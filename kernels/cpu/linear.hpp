// Linear layers over packed weights.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cpu/blocks.hpp"
#include "kernels/cpu/kernels.hpp"
#include "kernels/cpu/pool.hpp"

namespace twinplane::kernels {

// A matrix of floats whose rows lie `stride` floats apart.
struct Rows {
  const float* data;
  int64_t rows;
  int64_t columns;
  int64_t stride;
};
struct MutableRows {
  float* data;
  int64_t stride;
};

// How x meets quantized weights: as it is, or in groups of 8-bit integers (IntegerProduct). Others always take floats.
enum class Activations : uint8_t { kFloat, kInt8 };

class PackedLinear;

// The product that comes after another, whose weights can be fetched while there is no other work. Null: not known.
struct NextLinear {
  const PackedLinear* linear = nullptr;
  bool gated = false;  // by run_gated
};

// Weights [out_features, in_features] in column panels; the layouts inside a panel are drawn in dense.inl, formats.hpp.
//
// It consists of parts, each with panels of its own (and so the last one of each part may be narrower than the others):
// one as packed, or those of several linears after concat(). Packed weights are shared, never changed.
class PackedLinear {
 public:
  // Each copies what it is given; `bias` may be null. in_features of quantized kinds is a multiple of their block.
  static PackedLinear from_float(const float* weight, int64_t stride, int64_t out, int64_t in, WeightKind storage,
                                 const float* bias);
  static PackedLinear from_bf16(const Bf16* weight, int64_t stride, int64_t out, int64_t in, WeightKind storage,
                                const float* bias);
  static PackedLinear from_gguf(const uint8_t* blocks, int64_t out, int64_t in, WeightKind kind, const float* bias,
                                Activations activations);
  // The rows of all parts, one after the other; kinds may differ. Throws std::invalid_argument if in_features or
  // instruction sets do, or if there are none.
  static PackedLinear concat(const std::vector<const PackedLinear*>& parts);

  int64_t out_features() const { return out_; }
  int64_t in_features() const { return in_; }
  // Of each part.
  std::vector<WeightKind> kinds() const;
  // Whether any weight meets x as integers.
  bool integer() const;
  size_t nbytes() const;
  const char* isa() const { return kernels_->name; }

  // out = activation(x W^T + bias) + residual; residual null: none, may be out.
  void run(Pool& pool, const Rows& x, MutableRows out, const float* residual, int64_t residual_stride,
           Activation activation, NextLinear after = {}) const;
  // out = activation(first half of the columns) * second half.
  void run_gated(Pool& pool, const Rows& x, MutableRows out, Activation activation, NextLinear after = {}) const;
  // out[0 .. in_features) = row `id` of the weights.
  void unpack_row(int64_t id, float* out) const;

 private:
  struct Part {
    WeightKind kind;
    Activations activations;
    size_t nbytes;
    std::shared_ptr<Scratch> data;
  };
  struct Panel {
    uint8_t* data;
    WeightKind kind;
    bool integer;
    int64_t column;   // its first, of the whole
    int64_t columns;  // used
  };
  // x as the panels want it; what none of them wants is null.
  struct Input {
    Rows x;
    const ActivationTile* tiles;  // [ceil(rows / kTileRows)][in / kGroup]
    const SplitTile* split;       // [ceil(rows / kTileRows)][ceil(in / kGroup)]
  };

  PackedLinear(int64_t out, int64_t in, WeightKind kind, const float* bias, Activations activations);
  PackedLinear() = default;
  template <class Source>
  void pack_dense(const Source* weight, int64_t stride);

  // Whether panels of this kind hold pairs of k (dense.inl), and so meet x as SplitTile; whether any does.
  bool in_pairs(WeightKind kind) const {
    return kind == WeightKind::kBfloat16 && kernels_->split_activations != nullptr;
  }
  bool splits() const;
  // Where weight k of column c lies in a panel of floats.
  int64_t index_in(const Panel& panel, int64_t k, int64_t c) const {
    return in_pairs(panel.kind) ? (k / 2 * columns_ + c) * 2 + k % 2 : k * columns_ + c;
  }
  size_t panel_bytes() const { return nbytes() / std::max<size_t>(panels_.size(), 1); }
  const float* bias_at(int64_t column) const { return bias_.empty() ? nullptr : bias_.data() + column; }
  size_t scratch_bytes(int64_t panels_at_once) const;
  int64_t strip_rows() const { return splits() ? 2 * kTileRows : integer() ? kTileRows : kernels_->strip_rows; }
  Input input(Pool& pool, const Rows& x) const;
  // The first of its weights that a thread reads for so many rows.
  static Upcoming upcoming(const Pool& pool, NextLinear next, int64_t rows, int worker);
  Upcoming::Part panels_from(int64_t panel, size_t bytes) const;
  void multiply(const Panel& panel, const void* next, const Input& x, int64_t row, int64_t rows, float* acc,
                float* unpacked) const;
  bool halves_pair_up() const;
  void run_gated_pairs(Pool& pool, const Rows& x, MutableRows out, Activation activation, NextLinear after) const;

  const Kernels* kernels_ = nullptr;  // those it was packed for: the panel width is theirs
  int64_t out_ = 0;
  int64_t in_ = 0;
  int64_t columns_ = 0;  // per panel, padding included
  std::vector<Part> parts_;
  std::vector<Panel> panels_;
  std::vector<float> bias_;
};

// GGUF's reference quantizers: `groups` blocks from 32 floats each. Q8_0, Q4_0 and Q4_1 only.
void quantize_gguf(const float* values, int64_t groups, WeightKind kind, uint8_t* blocks);

}  // namespace twinplane::kernels
