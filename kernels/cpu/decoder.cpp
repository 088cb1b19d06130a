#include "kernels/cpu/decoder.hpp"

#include "kernels/cpu/elementwise.hpp"

namespace twinplane::kernels {
namespace {

// What a layer computes on its way; each part begins on a cache line.
struct Buffers {
  float* x;          // [T][hidden]
  float* qkv;        // [T][(H + 2 G) D]
  float* query;      // [T][H D]
  float* attention;  // [T][H D]
  float* inner;      // [T][I]

  Buffers(Scratch& scratch, const DecoderLayer& layer, const DecoderStep& step) {
    constexpr int64_t kLine = kCacheLine / sizeof(float);
    const int64_t heads = step.attention.num_heads * layer.cache.head_dim;
    const int64_t columns[] = {step.hidden, layer.qkv->out_features(), heads, heads, layer.down->in_features()};
    float** const parts[] = {&x, &qkv, &query, &attention, &inner};
    const auto floats = [&](int64_t width) { return (step.tokens * width + kLine - 1) / kLine * kLine; };
    int64_t total = 0;
    for (const int64_t width : columns) total += floats(width);
    float* at = static_cast<float*>(scratch.reserve(static_cast<size_t>(total) * sizeof(float)));
    for (int i = 0; i < 5; ++i) {
      *parts[i] = at;
      at += floats(columns[i]);
    }
  }
};

// `after`: what is computed after the layer.
void decoder_layer(Pool& pool, const DecoderLayer& layer, const DecoderStep& step, MutableRows residual,
                   NextLinear after) {
  static thread_local Scratch scratch;
  const Buffers b(scratch, layer, step);
  const int64_t heads = step.attention.num_heads * layer.cache.head_dim;
  const auto rows = [&](const float* data, int64_t columns) { return Rows{data, step.tokens, columns, columns}; };
  const Rows before{residual.data, step.tokens, step.hidden, residual.stride};

  rms_norm(pool, before, layer.input_norm, step.eps, {b.x, step.hidden});
  const int64_t projected = layer.qkv->out_features();
  layer.qkv->run(pool, rows(b.x, step.hidden), {b.qkv, projected}, nullptr, 0, Activation::kNone, {layer.output});
  rope_write_kv(pool, rows(b.qkv, projected), step.attention.num_heads, step.rotation, layer.head_norms, layer.cache,
                step.slots, b.query);
  AttentionBatch attention = step.attention;
  attention.query = {b.query, heads};
  attention.window = layer.window;
  paged_attention(pool, attention, layer.cache, {b.attention, heads});
  layer.output->run(pool, rows(b.attention, heads), residual, residual.data, residual.stride, Activation::kNone,
                    {layer.gate_up, true});

  rms_norm(pool, before, layer.mlp_norm, step.eps, {b.x, step.hidden});
  const int64_t inner = layer.down->in_features();
  layer.gate_up->run_gated(pool, rows(b.x, step.hidden), {b.inner, inner}, Activation::kSilu, {layer.down});
  layer.down->run(pool, rows(b.inner, inner), residual, residual.data, residual.stride, Activation::kNone, after);
}

}  // namespace

void decoder_layers(Pool& pool, const std::vector<DecoderLayer>& layers, const DecoderStep& step, MutableRows residual,
                    NextLinear after) {
  for (size_t i = 0; i < layers.size(); ++i) {
    const NextLinear next = i + 1 < layers.size() ? NextLinear{layers[i + 1].qkv} : after;
    decoder_layer(pool, layers[i], step, residual, next);
  }
}

void decoder_logits(Pool& pool, const Decoder& decoder, const DecoderStep& step, const int64_t* token_ids,
                    int64_t samples, const int64_t* sample_tokens, MutableRows out) {
  static thread_local Scratch scratch;
  const int64_t hidden = step.hidden;
  float* residual =
      static_cast<float*>(scratch.reserve(static_cast<size_t>((step.tokens + samples) * hidden) * sizeof(float)));
  pool.run(step.tokens, 0,
           [&](int64_t t, void*) { decoder.embedding->unpack_row(token_ids[t], residual + t * hidden); });
  decoder_layers(pool, decoder.layers, step, {residual, hidden}, {decoder.head});
  float* x = residual + step.tokens * hidden;
  for_rows(pool, samples, hidden, [&](int64_t row) {
    active().rms_norm(residual + sample_tokens[row] * hidden, decoder.norm, step.eps, x + row * hidden, hidden);
  });
  decoder.head->run(pool, {x, samples, hidden, hidden}, out, nullptr, 0, Activation::kNone);
}

}  // namespace twinplane::kernels
