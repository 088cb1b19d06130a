#include "kernels/cpu/linear.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/half.hpp"

namespace twinplane::kernels {
namespace {

// A tile of few rows should stream at least so much weight, or claiming tiles costs more than it balances ...
constexpr size_t kTileBytes = 64 * 1024;
// ... but each thread should find so many tiles, or the last one is waited for.
constexpr int64_t kTilesPerThread = 6;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of one packed column group: scales and minima of 32 weights for `columns` columns, then their numbers.
size_t scale_bytes(WeightKind kind, int64_t columns) {
  return static_cast<size_t>(columns) * (kind == WeightKind::kQ4_1 ? 4 : 2);
}
size_t line_bytes(WeightKind kind, int64_t columns) {
  return static_cast<size_t>(kind == WeightKind::kQ8_0 ? columns : columns / 2);
}
size_t group_bytes(WeightKind kind, int64_t columns) {
  return scale_bytes(kind, columns) + static_cast<size_t>(kGroup) * line_bytes(kind, columns);
}

size_t bytes_of_panel(WeightKind kind, int64_t columns, int64_t in) {
  switch (kind) {
    case WeightKind::kFloat32:
      return static_cast<size_t>(columns * in) * sizeof(float);
    case WeightKind::kBfloat16:
      return static_cast<size_t>(columns * in) * sizeof(Bf16);
    default:
      return static_cast<size_t>(in / kGroup) * group_bytes(kind, columns);
  }
}

void convert(float from, float& to) { to = from; }
void convert(float from, Bf16& to) { to = float_to_bf16(from); }
void convert(Bf16 from, float& to) { to = bf16_to_float(from); }
void convert(Bf16 from, Bf16& to) { to = from; }

// Number k (0 .. 31) of a GGUF block, as stored: Q4 blocks hold k and k + 16 in the halves of one byte.
uint8_t stored_number(const uint8_t* block, WeightKind kind, int64_t k) {
  switch (kind) {
    case WeightKind::kQ8_0:
      return block[2 + k];
    case WeightKind::kQ4_0:
      return static_cast<uint8_t>(block[2 + k % 16] >> (k < 16 ? 0 : 4) & 15);
    default:
      return static_cast<uint8_t>(block[4 + k % 16] >> (k < 16 ? 0 : 4) & 15);
  }
}

// Puts one GGUF block into column `c` of a packed group (zeroed before).
void pack_block(const uint8_t* block, WeightKind kind, uint8_t* group, int64_t c, int64_t columns) {
  std::memcpy(group + 2 * c, block, 2);
  if (kind == WeightKind::kQ4_1) std::memcpy(group + 2 * (columns + c), block + 2, 2);
  uint8_t* lines = group + scale_bytes(kind, columns);
  for (int64_t k = 0; k < kGroup; ++k, lines += line_bytes(kind, columns)) {
    const uint8_t number = stored_number(block, kind, k);
    if (kind == WeightKind::kQ8_0) {
      lines[c] = number;
    } else {
      const int64_t half = columns / 2;
      lines[c % half] = static_cast<uint8_t>(lines[c % half] | number << (c < half ? 0 : 4));
    }
  }
}

// One value of a packed group, exactly as the kernels see it.
float unpack_value(const uint8_t* group, WeightKind kind, int64_t c, int64_t k, int64_t columns) {
  uint16_t scale;
  std::memcpy(&scale, group + 2 * c, 2);
  const uint8_t* line = group + scale_bytes(kind, columns) + static_cast<size_t>(k) * line_bytes(kind, columns);
  const float d = half_to_float(scale);
  if (kind == WeightKind::kQ8_0) return static_cast<float>(static_cast<int8_t>(line[c])) * d;
  const int64_t half = columns / 2;
  const int number = line[c % half] >> (c < half ? 0 : 4) & 15;
  if (kind == WeightKind::kQ4_0) return static_cast<float>(number - 8) * d;
  uint16_t minimum;
  std::memcpy(&minimum, group + 2 * (columns + c), 2);
  return static_cast<float>(number) * d + half_to_float(minimum);
}

}  // namespace

size_t gguf_block_bytes(WeightKind kind) {
  return kind == WeightKind::kQ8_0 ? 34 : kind == WeightKind::kQ4_0 ? 18 : 20;
}

PackedLinear::PackedLinear(int64_t out, int64_t in, WeightKind kind, const float* bias)
    : kernels_(&active()),
      out_(out),
      in_(in),
      columns_(kernels_->panel_columns),
      kind_(kind),
      panel_bytes_(bytes_of_panel(kind, columns_, in)),
      data_(std::make_unique<Scratch>()) {
  data_->reserve(std::max<size_t>(nbytes(), 1));
  std::memset(data_->data(), 0, nbytes());
  if (bias != nullptr) bias_.assign(bias, bias + out);
}

template <class Source>
void PackedLinear::pack_dense(const Source* weight, int64_t stride) {
  const auto pack_as = [&](auto* typed) {
    using Stored = std::remove_reference_t<decltype(*typed)>;
    Pool::instance().run(static_cast<int64_t>(panels()), 0, [&](int64_t p, void*) {
      Stored* to = reinterpret_cast<Stored*>(panel(p));
      const int64_t columns = std::min(columns_, out_ - p * columns_);
      for (int64_t c = 0; c < columns; ++c) {
        const Source* from = weight + (p * columns_ + c) * stride;
        for (int64_t k = 0; k < in_; ++k) convert(from[k], to[k * columns_ + c]);
      }
    });
  };
  if (kind_ == WeightKind::kFloat32) {
    pack_as(static_cast<float*>(nullptr));
  } else {
    pack_as(static_cast<Bf16*>(nullptr));
  }
}

PackedLinear PackedLinear::from_float(const float* weight, int64_t stride, int64_t out, int64_t in, WeightKind storage,
                                      const float* bias) {
  PackedLinear linear(out, in, storage, bias);
  linear.pack_dense(weight, stride);
  return linear;
}

PackedLinear PackedLinear::from_bf16(const Bf16* weight, int64_t stride, int64_t out, int64_t in, WeightKind storage,
                                     const float* bias) {
  PackedLinear linear(out, in, storage, bias);
  linear.pack_dense(weight, stride);
  return linear;
}

PackedLinear PackedLinear::from_gguf(const uint8_t* blocks, int64_t out, int64_t in, WeightKind kind,
                                     const float* bias) {
  PackedLinear linear(out, in, kind, bias);
  const int64_t groups = in / kGroup;
  const size_t block_bytes = gguf_block_bytes(kind);
  Pool::instance().run(static_cast<int64_t>(linear.panels()), 0, [&](int64_t p, void*) {
    const int64_t columns = std::min(linear.columns_, out - p * linear.columns_);
    for (int64_t c = 0; c < columns; ++c) {
      const uint8_t* block = blocks + static_cast<size_t>((p * linear.columns_ + c) * groups) * block_bytes;
      uint8_t* group = linear.panel(p);
      for (int64_t g = 0; g < groups; ++g, block += block_bytes, group += group_bytes(kind, linear.columns_))
        pack_block(block, kind, group, c, linear.columns_);
    }
  });
  return linear;
}

void PackedLinear::unpack_row(int64_t id, float* out) const {
  const uint8_t* base = panel(id / columns_);
  const int64_t c = id % columns_;
  for (int64_t k = 0; k < in_; ++k) {
    switch (kind_) {
      case WeightKind::kFloat32:
        out[k] = reinterpret_cast<const float*>(base)[k * columns_ + c];
        break;
      case WeightKind::kBfloat16:
        out[k] = bf16_to_float(reinterpret_cast<const Bf16*>(base)[k * columns_ + c]);
        break;
      default:
        out[k] = unpack_value(base + static_cast<size_t>(k / kGroup) * group_bytes(kind_, columns_), kind_, c,
                              k % kGroup, columns_);
    }
  }
}

// ---- running
//
// A tile is some consecutive rows of x times some consecutive panels. Which tiles there are decides speed only: every
// output is computed by panel_product in the same order.

namespace {

struct TilePlan {
  int64_t rows_per_tile;
  int64_t panels_per_tile;
  int64_t row_tiles;
  int64_t panel_tiles;
  int64_t tiles() const { return row_tiles * panel_tiles; }
};

TilePlan plan_tiles(int64_t rows, int64_t panels, size_t panel_bytes, const Kernels& kernels, int threads) {
  const int64_t row_tiles = ceil_div(rows, kPanelRows);
  // Evenly cut, in whole strips.
  const int64_t per_tile =
      std::min(kPanelRows, ceil_div(ceil_div(rows, row_tiles), kernels.strip_rows) * kernels.strip_rows);
  int64_t panels_per_tile = 1;
  if (row_tiles == 1 && rows <= kernels.strip_rows) {
    panels_per_tile = std::clamp<int64_t>(static_cast<int64_t>(kTileBytes / std::max<size_t>(panel_bytes, 1)), 1,
                                          std::max<int64_t>(1, panels / (threads * kTilesPerThread)));
  }
  return {per_tile, panels_per_tile, ceil_div(rows, per_tile), ceil_div(panels, panels_per_tile)};
}

}  // namespace

size_t PackedLinear::scratch_bytes(int64_t panels_at_once) const {
  return static_cast<size_t>(columns_ * (kPanelRows * panels_at_once + kDepthBlock)) * sizeof(float);
}

void PackedLinear::multiply(int64_t panel_index, const Rows& x, int64_t row, int64_t rows, float* acc,
                            float* unpacked) const {
  kernels_->panel_product({.panel = panel(panel_index),
                           .kind = kind_,
                           .depth = in_,
                           .x = x.data + row * x.stride,
                           .x_stride = x.stride,
                           .rows = rows,
                           .acc = acc,
                           .unpacked = unpacked});
}

void PackedLinear::run(Pool& pool, const Rows& x, MutableRows out, const float* residual, int64_t residual_stride,
                       Activation activation) const {
  if (x.rows == 0) return;
  const int64_t all_panels = static_cast<int64_t>(panels());
  const TilePlan plan = plan_tiles(x.rows, all_panels, panel_bytes_, *kernels_, pool.threads());
  pool.run(plan.tiles(), scratch_bytes(1), [&](int64_t tile, void* scratch) {
    float* acc = static_cast<float*>(scratch);
    const int64_t row = tile / plan.panel_tiles * plan.rows_per_tile;
    const int64_t rows = std::min(plan.rows_per_tile, x.rows - row);
    const int64_t first = tile % plan.panel_tiles * plan.panels_per_tile;
    for (int64_t p = first; p < std::min(all_panels, first + plan.panels_per_tile); ++p) {
      multiply(p, x, row, rows, acc, acc + kPanelRows * columns_);
      const int64_t column = p * columns_;
      kernels_->linear_epilogue({.acc = acc,
                                 .rows = rows,
                                 .columns = std::min(columns_, out_ - column),
                                 .bias = bias_at(column),
                                 .residual = residual == nullptr ? nullptr : residual + row * residual_stride + column,
                                 .residual_stride = residual_stride,
                                 .out = out.data + row * out.stride + column,
                                 .out_stride = out.stride,
                                 .activation = activation});
    }
  });
}

void PackedLinear::run_gated(Pool& pool, const Rows& x, MutableRows out, Activation activation) const {
  if (x.rows == 0) return;
  const int64_t half = out_ / 2;
  if (half % columns_ == 0) return run_gated_aligned(pool, x, out, activation);
  // The halves do not begin on panel borders: through a buffer.
  std::vector<float> both(static_cast<size_t>(x.rows * out_));
  run(pool, x, {both.data(), out_}, nullptr, 0, Activation::kNone);
  pool.run(x.rows, 0, [&](int64_t row, void*) {
    const float* line = both.data() + row * out_;
    kernels_->gated_epilogue({.gate = line,
                              .up = line + half,
                              .acc_stride = out_,
                              .rows = 1,
                              .columns = half,
                              .gate_bias = nullptr,
                              .up_bias = nullptr,
                              .out = out.data + row * out.stride,
                              .out_stride = out.stride,
                              .activation = activation});
  });
}

void PackedLinear::run_gated_aligned(Pool& pool, const Rows& x, MutableRows out, Activation activation) const {
  const int64_t half = out_ / 2;
  const int64_t half_panels = half / columns_;
  const TilePlan plan = plan_tiles(x.rows, half_panels, 2 * panel_bytes_, *kernels_, pool.threads());
  pool.run(plan.tiles(), scratch_bytes(2), [&](int64_t tile, void* scratch) {
    float* gate = static_cast<float*>(scratch);
    float* up = gate + kPanelRows * columns_;
    float* unpacked = up + kPanelRows * columns_;
    const int64_t row = tile / plan.panel_tiles * plan.rows_per_tile;
    const int64_t rows = std::min(plan.rows_per_tile, x.rows - row);
    const int64_t first = tile % plan.panel_tiles * plan.panels_per_tile;
    for (int64_t p = first; p < std::min(half_panels, first + plan.panels_per_tile); ++p) {
      multiply(p, x, row, rows, gate, unpacked);
      multiply(p + half_panels, x, row, rows, up, unpacked);
      const int64_t column = p * columns_;
      kernels_->gated_epilogue({.gate = gate,
                                .up = up,
                                .acc_stride = columns_,
                                .rows = rows,
                                .columns = columns_,
                                .gate_bias = bias_at(column),
                                .up_bias = bias_at(half + column),
                                .out = out.data + row * out.stride + column,
                                .out_stride = out.stride,
                                .activation = activation});
    }
  });
}

}  // namespace twinplane::kernels
