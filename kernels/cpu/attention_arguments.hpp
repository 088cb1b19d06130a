// The arguments of attention and of what writes its cache, checked: whoever calls these gets views that the kernels may
// follow without looking, or a ValueError that names the argument.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>

#include "kernels/cpu/arrays.hpp"
#include "kernels/cpu/attention.hpp"

namespace twinplane::kernels {

inline constexpr Dtype kF32 = Dtype::kFloat32;

inline std::string number(int64_t x) { return std::to_string(x); }

// An argument that may be None.
class OptionalArray {
 public:
  OptionalArray(nanobind::handle object, const char* name) {
    if (!object.is_none()) array_.emplace(object, name);
  }
  const float* vector(int64_t length, const char* letters) const {
    return array_ ? array_->of({kF32}).shaped({length}, letters).contiguous().data<const float>() : nullptr;
  }
  const std::optional<Array>& array() const { return array_; }

 private:
  std::optional<Array> array_;
};

KvCache cache_of(const Array& keys, const Array& values);

// A cache that one projection of `num_heads` query heads writes: heads of K and V of one size, as many as
// `num_kv_heads`.
KvCache projected_cache_of(const Array& keys, const Array& values, int64_t num_heads, int64_t num_kv_heads);

// [tokens], each within the cache.
const int64_t* slots_of(const Array& slots, int64_t tokens, const KvCache& cache);

Heads heads_of(const Array& x, int64_t tokens, int64_t heads, int64_t dim, const char* letters);

// Of heads that have `head_dim` dims.
Rotation rotation_of(const Array& cos, const Array& sin, int64_t tokens, int64_t head_dim);

// The same out of tables of all positions, of which token t has positions[t].
Rotation rotation_at(const Array& cos, const Array& sin, const Array& positions, int64_t tokens, int64_t head_dim);

const int32_t* int32_vector(const Array& x, int64_t length, const char* letters);

// Everything the kernels will read through an index, before they do.
void check_sequences(const AttentionBatch& batch, const KvCache& cache, int64_t tokens, const Array& tables,
                     const Array& contexts, const Array& starts, const std::optional<Array>& rows);

}  // namespace twinplane::kernels
