// Drawing a token from a row of logits (shared/PROTOCOL.md, section 5).
#pragma once

#include <cstdint>

namespace twinplane::kernels {

// How a row's distribution is cut. top_k 0, top_p >= 1 and min_p 0 are off.
struct Draw {
  float temperature;
  int64_t top_k;
  float top_p;
  float min_p;
  float uniform;  // [0, 1)
};

// Temperature, top-k, top-p, min-p, then the inverse CDF over the kept tokens in descending probability (ties: lower id
// first). -1 for a row that holds NaN or has no finite greatest value. A pure function of its arguments (INV-10).
int32_t draw_token(const float* logits, int64_t vocab, const Draw& draw);

// The number in [0, 1) behind the token at `position`: 24 bits of Philox-4x32-10 (Salmon et al., SC'11).
float uniform(uint64_t seed, uint32_t stream, uint32_t position);

}  // namespace twinplane::kernels
