// GGUF blocks into packed panels, and single values out of them. The layout is drawn in formats.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/kernels.hpp"

namespace twinplane::kernels {

// Bytes of a block of a GGUF file, and how many weights it holds.
size_t gguf_block_bytes(WeightKind kind);
int64_t gguf_block_weights(WeightKind kind);

// Bytes of a panel of `columns` columns and depth `in`, of any kind.
size_t bytes_of_panel(WeightKind kind, int64_t columns, int64_t in);

// Puts GGUF block number `index` of column `c` into a panel (zeroed before).
void pack_block(const uint8_t* block, WeightKind kind, uint8_t* panel, int64_t index, int64_t c, int64_t columns);

// Weight k of column c, exactly as the kernels see it.
float unpack_value(const uint8_t* panel, WeightKind kind, int64_t c, int64_t k, int64_t columns);

}  // namespace twinplane::kernels
