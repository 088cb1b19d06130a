// Decoder layers one after the other, as kernels/decoder.py defines them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cpu/attention.hpp"
#include "kernels/cpu/linear.hpp"
#include "kernels/cpu/pool.hpp"

namespace twinplane::kernels {

// The weights of one layer, and its cache.
struct DecoderLayer {
  const float* input_norm;  // [hidden]
  const PackedLinear* qkv;  // hidden -> (H + 2 G) D
  HeadNorms head_norms;
  const PackedLinear* output;   // H D -> hidden
  const float* mlp_norm;        // [hidden]
  const PackedLinear* gate_up;  // hidden -> 2 I, gate first
  const PackedLinear* down;     // I -> hidden
  int64_t window;               // keys visible; 0: all
  KvCache cache;
};

// What all layers share. Of `attention`, query and window are each layer's own.
struct DecoderStep {
  int64_t tokens;
  int64_t hidden;
  float eps;  // of all norms
  Rotation rotation;
  const int64_t* slots;
  AttentionBatch attention;
};

// A model from token ids to logits.
struct Decoder {
  const PackedLinear* embedding;  // vocabulary x hidden
  std::vector<DecoderLayer> layers;
  const float* norm;         // [hidden]
  const PackedLinear* head;  // hidden -> vocabulary
};

// residual [tokens][hidden] is updated in place; the tokens' keys and values go to the caches.
void decoder_layers(Pool& pool, const std::vector<DecoderLayer>& layers, const DecoderStep& step, MutableRows residual,
                    NextLinear after = {});

// out [samples][vocabulary]: the logits after tokens sample_tokens [samples] of token_ids [tokens]; the rest as above.
void decoder_logits(Pool& pool, const Decoder& decoder, const DecoderStep& step, const int64_t* token_ids,
                    int64_t samples, const int64_t* sample_tokens, MutableRows out);

}  // namespace twinplane::kernels
