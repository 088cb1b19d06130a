#include "kernels/cpu/linear.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/cpu/formats.hpp"
#include "kernels/cpu/half.hpp"

namespace twinplane::kernels {
namespace {

// Each thread should find so many tiles, or the last one is waited for. Otherwise they should be large: a panel comes
// from memory once for all rows of a tile, and with few rows it takes some weight to be worth claiming a tile.
constexpr int64_t kTilesPerThread = 6;
constexpr size_t kTileBytes = 64 * 1024;
// Quantizing x is shared out by so many floats: less is done faster than a thread is told about it.
constexpr int64_t kFloatsPerTile = 16 * 1024;
// What a thread fetches of the next linear should stay in its second cache, beside what is in use.
constexpr size_t kUpcomingBytes = 128 * 1024;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void convert(float from, float& to) { to = from; }
void convert(float from, Bf16& to) { to = float_to_bf16(from); }
void convert(Bf16 from, float& to) { to = bf16_to_float(from); }
void convert(Bf16 from, Bf16& to) { to = from; }

}  // namespace

PackedLinear::PackedLinear(int64_t out, int64_t in, WeightKind kind, const float* bias, Activations activations)
    : kernels_(&active()), out_(out), in_(in), columns_(kernels_->panel_columns) {
  const size_t panel_bytes = bytes_of_panel(kind, columns_, in_pairs(kind) ? ceil_div(in, kGroup) * kGroup : in);
  const size_t panels = static_cast<size_t>(ceil_div(out, columns_));
  const size_t bytes = panels * panel_bytes;
  auto data = std::make_shared<Scratch>();
  uint8_t* memory = static_cast<uint8_t*>(data->reserve(std::max<size_t>(bytes, 1)));
  std::memset(memory, 0, bytes);
  parts_.push_back({kind, activations, bytes, std::move(data)});
  for (size_t p = 0; p < panels; ++p) {
    const int64_t column = static_cast<int64_t>(p) * columns_;
    panels_.push_back({.data = memory + p * panel_bytes,
                       .kind = kind,
                       .integer = is_quantized(kind) && activations == Activations::kInt8,
                       .column = column,
                       .columns = std::min(columns_, out - column)});
  }
  if (bias != nullptr) bias_.assign(bias, bias + out);
}

template <class Source>
void PackedLinear::pack_dense(const Source* weight, int64_t stride) {
  const auto pack_as = [&](auto* typed) {
    using Stored = std::remove_reference_t<decltype(*typed)>;
    Pool::instance().run(static_cast<int64_t>(panels_.size()), 0, [&](int64_t p, void*) {
      const Panel& panel = panels_[static_cast<size_t>(p)];
      Stored* to = reinterpret_cast<Stored*>(panel.data);
      for (int64_t c = 0; c < panel.columns; ++c) {
        const Source* from = weight + (panel.column + c) * stride;
        for (int64_t k = 0; k < in_; ++k) convert(from[k], to[index_in(panel, k, c)]);
      }
    });
  };
  if (parts_[0].kind == WeightKind::kFloat32) {
    pack_as(static_cast<float*>(nullptr));
  } else {
    pack_as(static_cast<Bf16*>(nullptr));
  }
}

PackedLinear PackedLinear::from_float(const float* weight, int64_t stride, int64_t out, int64_t in, WeightKind storage,
                                      const float* bias) {
  PackedLinear linear(out, in, storage, bias, Activations::kFloat);
  linear.pack_dense(weight, stride);
  return linear;
}

PackedLinear PackedLinear::from_bf16(const Bf16* weight, int64_t stride, int64_t out, int64_t in, WeightKind storage,
                                     const float* bias) {
  PackedLinear linear(out, in, storage, bias, Activations::kFloat);
  linear.pack_dense(weight, stride);
  return linear;
}

PackedLinear PackedLinear::from_gguf(const uint8_t* blocks, int64_t out, int64_t in, WeightKind kind, const float* bias,
                                     Activations activations) {
  PackedLinear linear(out, in, kind, bias, activations);
  const int64_t per_column = in / gguf_block_weights(kind);
  const size_t block_bytes = gguf_block_bytes(kind);
  Pool::instance().run(static_cast<int64_t>(linear.panels_.size()), 0, [&](int64_t p, void*) {
    const Panel& panel = linear.panels_[static_cast<size_t>(p)];
    for (int64_t c = 0; c < panel.columns; ++c) {
      const uint8_t* block = blocks + static_cast<size_t>((panel.column + c) * per_column) * block_bytes;
      for (int64_t i = 0; i < per_column; ++i, block += block_bytes)
        pack_block(block, kind, panel.data, i, c, linear.columns_);
    }
  });
  return linear;
}

PackedLinear PackedLinear::concat(const std::vector<const PackedLinear*>& parts) {
  if (parts.empty()) throw std::invalid_argument("there are no linears to concatenate");
  PackedLinear whole;
  whole.kernels_ = parts[0]->kernels_;
  whole.in_ = parts[0]->in_;
  whole.columns_ = parts[0]->columns_;
  const bool biased = std::any_of(parts.begin(), parts.end(), [](const PackedLinear* p) { return !p->bias_.empty(); });
  for (const PackedLinear* part : parts) {
    if (part->in_ != whole.in_) {
      throw std::invalid_argument("linears of " + std::to_string(whole.in_) + " and " + std::to_string(part->in_) +
                                  " input features can not be concatenated");
    }
    if (part->kernels_ != whole.kernels_) {
      throw std::invalid_argument(std::string("linears packed for ") + whole.isa() + " and " + part->isa() +
                                  " can not be concatenated");
    }
    whole.parts_.insert(whole.parts_.end(), part->parts_.begin(), part->parts_.end());
    for (Panel panel : part->panels_) {
      panel.column += whole.out_;
      whole.panels_.push_back(panel);
    }
    whole.out_ += part->out_;
    whole.bias_.insert(whole.bias_.end(), part->bias_.begin(), part->bias_.end());
    if (biased) whole.bias_.resize(static_cast<size_t>(whole.out_));
  }
  return whole;
}

std::vector<WeightKind> PackedLinear::kinds() const {
  std::vector<WeightKind> kinds;
  for (const Part& part : parts_) kinds.push_back(part.kind);
  return kinds;
}

bool PackedLinear::integer() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const Part& part) {
    return is_quantized(part.kind) && part.activations == Activations::kInt8;
  });
}

bool PackedLinear::splits() const {
  return std::any_of(parts_.begin(), parts_.end(), [this](const Part& part) { return in_pairs(part.kind); });
}

size_t PackedLinear::nbytes() const {
  size_t bytes = 0;
  for (const Part& part : parts_) bytes += part.nbytes;
  return bytes;
}

void PackedLinear::unpack_row(int64_t id, float* out) const {
  const auto after = std::upper_bound(panels_.begin(), panels_.end(), id,
                                      [](int64_t column, const Panel& panel) { return column < panel.column; });
  const Panel& panel = *std::prev(after);
  const int64_t c = id - panel.column;
  for (int64_t k = 0; k < in_; ++k) {
    if (panel.kind == WeightKind::kFloat32) {
      out[k] = reinterpret_cast<const float*>(panel.data)[k * columns_ + c];
    } else if (panel.kind == WeightKind::kBfloat16) {
      out[k] = bf16_to_float(reinterpret_cast<const Bf16*>(panel.data)[index_in(panel, k, c)]);
    } else {
      out[k] = unpack_value(panel.data, panel.kind, c, k, columns_);
    }
  }
}

// ---- running
//
// A tile is some consecutive rows of x times some consecutive panels. Which tiles there are decides speed only: every
// output is computed by panel_product (or integer_product) in the same order.

namespace {

struct TilePlan {
  int64_t rows_per_tile;
  int64_t panels_per_tile;
  int64_t row_tiles;
  int64_t panel_tiles;
  int64_t tiles() const { return row_tiles * panel_tiles; }
  int64_t first_panel(int64_t tile) const { return tile % panel_tiles * panels_per_tile; }
};

// `strip_rows`: how many rows the kernels like to take at once.
TilePlan plan_tiles(int64_t rows, int64_t panels, size_t panel_bytes, int64_t strip_rows, int threads) {
  const int64_t strips = ceil_div(rows, strip_rows);
  const int64_t balanced = std::min(strips, ceil_div(threads * kTilesPerThread, panels));
  const int64_t row_tiles = std::max(ceil_div(rows, kPanelRows), balanced);
  // Evenly cut, in whole strips.
  const int64_t per_tile = std::min(kPanelRows, ceil_div(strips, row_tiles) * strip_rows);
  int64_t panels_per_tile = 1;
  if (rows <= strip_rows) {
    panels_per_tile = std::clamp<int64_t>(static_cast<int64_t>(kTileBytes / std::max<size_t>(panel_bytes, 1)), 1,
                                          std::max<int64_t>(1, panels / (threads * kTilesPerThread)));
  }
  return {per_tile, panels_per_tile, ceil_div(rows, per_tile), ceil_div(panels, panels_per_tile)};
}

}  // namespace

size_t PackedLinear::scratch_bytes(int64_t panels_at_once) const {
  return static_cast<size_t>(columns_ * (kPanelRows * panels_at_once + kDepthBlock)) * sizeof(float);
}

namespace {

// convert(x, x_stride, rows, to) for each tile of rows; `to` points to its `per_tile` parts in `buffer`.
template <class Part, class Convert>
const Part* tiles_of(Pool& pool, const Rows& x, int64_t per_tile, Scratch& buffer, const Convert& convert) {
  const int64_t tiles = ceil_div(x.rows, kTileRows);
  auto* to = static_cast<Part*>(buffer.reserve(static_cast<size_t>(tiles * per_tile) * sizeof(Part)));
  const int64_t at_once = std::max<int64_t>(1, kFloatsPerTile / std::max<int64_t>(1, x.columns * kTileRows));
  pool.run(ceil_div(tiles, at_once), 0, [&](int64_t share, void*) {
    for (int64_t tile = share * at_once; tile < std::min(tiles, (share + 1) * at_once); ++tile) {
      const int64_t row = tile * kTileRows;
      convert(x.data + row * x.stride, x.stride, std::min(kTileRows, x.rows - row), x.columns, to + tile * per_tile);
    }
  });
  return to;
}

}  // namespace

PackedLinear::Input PackedLinear::input(Pool& pool, const Rows& x) const {
  static thread_local Scratch integers;  // the caller's, read by all threads until the caller has its result
  static thread_local Scratch pieces;
  Input input{x, nullptr, nullptr};
  if (integer())
    input.tiles = tiles_of<ActivationTile>(pool, x, in_ / kGroup, integers, kernels_->quantize_activations);
  if (splits()) input.split = tiles_of<SplitTile>(pool, x, ceil_div(in_, kGroup), pieces, kernels_->split_activations);
  return input;
}

Upcoming::Part PackedLinear::panels_from(int64_t panel, size_t bytes) const {
  size_t contiguous = panel_bytes();
  const uint8_t* data = panels_[static_cast<size_t>(panel)].data;
  for (size_t p = static_cast<size_t>(panel) + 1; contiguous < bytes && p < panels_.size(); ++p) {
    if (panels_[p].data != data + contiguous) break;
    contiguous += panel_bytes();
  }
  return {data, std::min(bytes, contiguous)};
}

Upcoming PackedLinear::upcoming(const Pool& pool, NextLinear next, int64_t rows, int worker) {
  if (next.linear == nullptr || next.linear->panels_.empty()) return {};
  const PackedLinear& linear = *next.linear;
  const bool pairs = next.gated && linear.halves_pair_up();
  const int64_t panels = static_cast<int64_t>(linear.panels_.size()) / (pairs ? 2 : 1);
  const TilePlan plan =
      plan_tiles(rows, panels, linear.panel_bytes() * (pairs ? 2 : 1), linear.strip_rows(), pool.threads());
  const int64_t panel = plan.first_panel(std::min(pool.first_tile(plan.tiles(), worker), plan.tiles() - 1));
  if (!pairs) return {{linear.panels_from(panel, kUpcomingBytes), {}}};
  return {{linear.panels_from(panel, kUpcomingBytes / 2), linear.panels_from(panel + panels, kUpcomingBytes / 2)}};
}

void PackedLinear::multiply(const Panel& panel, const void* next, const Input& input, int64_t row, int64_t rows,
                            float* acc, float* unpacked) const {
  if (in_ == 0) return static_cast<void>(std::fill_n(acc, rows * columns_, 0.0f));
  if (next == nullptr) next = panel.data;
  if (panel.integer) {
    return kernels_->integer_product({.panel = panel.data,
                                      .next = next,
                                      .kind = panel.kind,
                                      .depth = in_,
                                      .x = input.tiles + row / kTileRows * (in_ / kGroup),
                                      .rows = rows,
                                      .acc = acc});
  }
  kernels_->panel_product(
      {.panel = panel.data,
       .next = next,
       .kind = panel.kind,
       .depth = in_,
       .x = input.x.data + row * input.x.stride,
       .x_stride = input.x.stride,
       .split = input.split == nullptr ? nullptr : input.split + row / kTileRows * ceil_div(in_, kGroup),
       .rows = rows,
       .acc = acc,
       .unpacked = unpacked});
}

void PackedLinear::run(Pool& pool, const Rows& x, MutableRows out, const float* residual, int64_t residual_stride,
                       Activation activation, NextLinear after) const {
  if (x.rows == 0) return;
  const Input from = input(pool, x);
  const int64_t all_panels = static_cast<int64_t>(panels_.size());
  const TilePlan plan = plan_tiles(x.rows, all_panels, panel_bytes(), strip_rows(), pool.threads());
  const auto next_tile = [&](int64_t tile, int worker) {
    return pool.goes_on(plan.tiles(), tile, worker) ? panels_[static_cast<size_t>(plan.first_panel(tile + 1))].data
                                                    : upcoming(pool, after, x.rows, worker).parts[0].data;
  };
  const auto product = [&](int64_t tile, void* scratch, int worker) {
    float* acc = static_cast<float*>(scratch);
    const int64_t row = tile / plan.panel_tiles * plan.rows_per_tile;
    const int64_t rows = std::min(plan.rows_per_tile, x.rows - row);
    const int64_t first = plan.first_panel(tile);
    const int64_t end = std::min(all_panels, first + plan.panels_per_tile);
    for (int64_t p = first; p < end; ++p) {
      const Panel& panel = panels_[static_cast<size_t>(p)];
      const int64_t column = panel.column;
      const void* next = p + 1 < end ? panels_[static_cast<size_t>(p + 1)].data : next_tile(tile, worker);
      multiply(panel, next, from, row, rows, acc, acc + kPanelRows * columns_);
      kernels_->linear_epilogue({.acc = acc,
                                 .rows = rows,
                                 .columns = panel.columns,
                                 .bias = bias_at(column),
                                 .residual = residual == nullptr ? nullptr : residual + row * residual_stride + column,
                                 .residual_stride = residual_stride,
                                 .out = out.data + row * out.stride + column,
                                 .out_stride = out.stride,
                                 .activation = activation});
    }
  };
  pool.run_indexed(plan.tiles(), scratch_bytes(1), product,
                   [&](int worker) { return upcoming(pool, after, x.rows, worker); });
}

// Whether panel i of the first half covers the same columns of it as panel i of the second does of its own.
bool PackedLinear::halves_pair_up() const {
  if (panels_.size() % 2 != 0) return false;
  const size_t half = panels_.size() / 2;
  for (size_t p = 0; p < half; ++p) {
    if (panels_[p].column + out_ / 2 != panels_[p + half].column || panels_[p].columns != panels_[p + half].columns)
      return false;
  }
  return true;
}

void PackedLinear::run_gated(Pool& pool, const Rows& x, MutableRows out, Activation activation,
                             NextLinear after) const {
  if (x.rows == 0) return;
  if (halves_pair_up()) return run_gated_pairs(pool, x, out, activation, after);
  const int64_t half = out_ / 2;
  // A panel holds columns of both halves: through a buffer.
  std::vector<float> both(static_cast<size_t>(x.rows * out_));
  run(pool, x, {both.data(), out_}, nullptr, 0, Activation::kNone, after);
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

void PackedLinear::run_gated_pairs(Pool& pool, const Rows& x, MutableRows out, Activation activation,
                                   NextLinear after) const {
  const Input from = input(pool, x);
  const int64_t half = out_ / 2;
  const int64_t half_panels = static_cast<int64_t>(panels_.size()) / 2;
  const TilePlan plan = plan_tiles(x.rows, half_panels, 2 * panel_bytes(), strip_rows(), pool.threads());
  const auto next_tile = [&](int64_t tile, int worker) {
    return pool.goes_on(plan.tiles(), tile, worker) ? panels_[static_cast<size_t>(plan.first_panel(tile + 1))].data
                                                    : upcoming(pool, after, x.rows, worker).parts[0].data;
  };
  const auto product = [&](int64_t tile, void* scratch, int worker) {
    float* gate = static_cast<float*>(scratch);
    float* up = gate + kPanelRows * columns_;
    float* unpacked = up + kPanelRows * columns_;
    const int64_t row = tile / plan.panel_tiles * plan.rows_per_tile;
    const int64_t rows = std::min(plan.rows_per_tile, x.rows - row);
    const int64_t first = plan.first_panel(tile);
    const int64_t end = std::min(half_panels, first + plan.panels_per_tile);
    for (int64_t p = first; p < end; ++p) {
      const Panel& panel = panels_[static_cast<size_t>(p)];
      const Panel& other = panels_[static_cast<size_t>(p + half_panels)];
      const void* next = p + 1 < end ? panels_[static_cast<size_t>(p + 1)].data : next_tile(tile, worker);
      multiply(panel, other.data, from, row, rows, gate, unpacked);
      multiply(other, next, from, row, rows, up, unpacked);
      kernels_->gated_epilogue({.gate = gate,
                                .up = up,
                                .acc_stride = columns_,
                                .rows = rows,
                                .columns = panel.columns,
                                .gate_bias = bias_at(panel.column),
                                .up_bias = bias_at(half + panel.column),
                                .out = out.data + row * out.stride + panel.column,
                                .out_stride = out.stride,
                                .activation = activation});
    }
  };
  pool.run_indexed(plan.tiles(), scratch_bytes(2), product,
                   [&](int worker) { return upcoming(pool, after, x.rows, worker); });
}

}  // namespace twinplane::kernels
