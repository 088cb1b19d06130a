// Attention of one tile, with vectors: what the table has of it. Included by isa_*.cpp last.

namespace twinplane::kernels::TWINPLANE_ISA {

size_t attention_scratch(int64_t head_dim, int64_t) {
  return static_cast<size_t>(kAttentionRows * (head_dim + kAttentionSplit)) * sizeof(float);
}

void attention_query(const AttentionTile& t, void* scratch) {
  const float unit = t.type == KvType::kFp8 ? kFp8Unit : 1;
  for (int64_t token = 0; token < t.tokens; ++token) {
    const float* from = t.query + token * t.query_stride;
    float* to = static_cast<float*>(scratch) + token * t.heads * t.head_dim;
    for (int64_t i = 0; i < t.heads * t.head_dim; ++i) to[i] = from[i] * unit;
  }
}

void attention_partition(const AttentionPartition& now, const AttentionPartition& next, SoftmaxState* states,
                         float* sums, void* scratch) {
  const AttentionTile& t = *now.tile;
  const int64_t partition = now.index;
  switch (t.type) {
    case KvType::kFloat32:
      return attention_partition_of<float>(t, partition, next, states, sums, scratch);
    case KvType::kBfloat16:
      return attention_partition_of<Bf16>(t, partition, next, states, sums, scratch);
    case KvType::kFp8:
      return attention_partition_of<Fp8>(t, partition, next, states, sums, scratch);
  }
}

void attention_merge(SoftmaxState& state, float* sums, const SoftmaxState& part, const float* part_sums,
                     int64_t value_dim) {
  if (part.sum == 0) return;  // no visible key in it (one key alone weighs e^0 = 1)
  if (state.sum == 0) {
    state = part;
    for (int64_t d = 0; d < value_dim; ++d) sums[d] = part_sums[d];
    return;
  }
  const float max = part.max > state.max ? part.max : state.max;
  const float keep = power_of_two(state.max - max);
  const float add = power_of_two(part.max - max);
  state = {max, state.sum * keep + part.sum * add};
  for (int64_t d = 0; d < value_dim; ++d) sums[d] = sums[d] * keep + part_sums[d] * add;
}

void attention_finish(const SoftmaxState& state, const float* sums, const float* sink, float* out, int64_t value_dim) {
  float scale = 1;
  float denominator = state.sum;
  if (sink != nullptr) {
    // Relative to the greater of the two, so that neither exponential overflows.
    const float power = *sink * kLog2E;
    const float max = power > state.max ? power : state.max;
    scale = power_of_two(state.max - max);
    denominator = state.sum * scale + power_of_two(power - max);
  }
  const float factor = scale / denominator;
  for (int64_t d = 0; d < value_dim; ++d) out[d] = sums[d] * factor;
}

}  // namespace twinplane::kernels::TWINPLANE_ISA
