// Work on the rows of a matrix, each by itself.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/kernels.hpp"
#include "kernels/cpu/linear.hpp"
#include "kernels/cpu/pool.hpp"

namespace twinplane::kernels {

// Rows are shared out in tiles of about so many floats: less is done faster than a thread is told about it.
inline constexpr int64_t kFloatsPerRowTile = 16 * 1024;

template <class PerRow>
void for_rows(Pool& pool, int64_t rows, int64_t row_floats, const PerRow& per_row) {
  const int64_t per_tile = std::max<int64_t>(1, kFloatsPerRowTile / std::max<int64_t>(1, row_floats));
  pool.run((rows + per_tile - 1) / per_tile, 0, [&](int64_t tile, void*) {
    for (int64_t row = tile * per_tile; row < std::min(rows, (tile + 1) * per_tile); ++row) per_row(row);
  });
}

// out may be x.
inline void rms_norm(Pool& pool, const Rows& x, const float* weight, float eps, MutableRows out) {
  for_rows(pool, x.rows, x.columns, [&](int64_t row) {
    active().rms_norm(x.data + row * x.stride, weight, eps, out.data + row * out.stride, x.columns);
  });
}

}  // namespace twinplane::kernels
