// Linear layers over packed weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

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

// Weights [out_features, in_features] in column panels; the layout inside a panel is drawn in linear.inl.
class PackedLinear {
 public:
  // Each copies what it is given; `bias` may be null. in_features of quantized kinds is a multiple of kGroup.
  static PackedLinear from_float(const float* weight, int64_t stride, int64_t out, int64_t in, WeightKind storage,
                                 const float* bias);
  static PackedLinear from_bf16(const Bf16* weight, int64_t stride, int64_t out, int64_t in, WeightKind storage,
                                const float* bias);
  static PackedLinear from_gguf(const uint8_t* blocks, int64_t out, int64_t in, WeightKind kind, const float* bias);

  int64_t out_features() const { return out_; }
  int64_t in_features() const { return in_; }
  WeightKind kind() const { return kind_; }
  size_t nbytes() const { return panels() * panel_bytes_; }
  const char* isa() const { return kernels_->name; }

  // out = activation(x W^T + bias) + residual; residual null: none, may be out.
  void run(Pool& pool, const Rows& x, MutableRows out, const float* residual, int64_t residual_stride,
           Activation activation) const;
  // out = activation(first half of the columns) * second half.
  void run_gated(Pool& pool, const Rows& x, MutableRows out, Activation activation) const;
  // out[0 .. in_features) = row `id` of the weights.
  void unpack_row(int64_t id, float* out) const;

 private:
  PackedLinear(int64_t out, int64_t in, WeightKind kind, const float* bias);
  template <class Source>
  void pack_dense(const Source* weight, int64_t stride);

  size_t panels() const { return static_cast<size_t>((out_ + columns_ - 1) / columns_); }
  const uint8_t* panel(int64_t i) const {
    return static_cast<const uint8_t*>(data_->data()) + static_cast<size_t>(i) * panel_bytes_;
  }
  uint8_t* panel(int64_t i) { return static_cast<uint8_t*>(data_->data()) + static_cast<size_t>(i) * panel_bytes_; }
  const float* bias_at(int64_t column) const { return bias_.empty() ? nullptr : bias_.data() + column; }
  size_t scratch_bytes(int64_t panels_at_once) const;
  void multiply(int64_t panel_index, const Rows& x, int64_t row, int64_t rows, float* acc, float* unpacked) const;
  void run_gated_aligned(Pool& pool, const Rows& x, MutableRows out, Activation activation) const;

  const Kernels* kernels_;  // those it was packed for: the panel width is theirs
  int64_t out_;
  int64_t in_;
  int64_t columns_;  // per panel
  WeightKind kind_;
  size_t panel_bytes_;
  std::unique_ptr<Scratch> data_;
  std::vector<float> bias_;
};

// Bytes of GGUF's block of kGroup weights.
size_t gguf_block_bytes(WeightKind kind);

// GGUF's reference quantizers: `groups` blocks from 32 floats each.
void quantize_gguf(const float* values, int64_t groups, WeightKind kind, uint8_t* blocks);

}  // namespace twinplane::kernels
