#include <nanobind/nanobind.h>

#include "kernels/cpu/bindings.hpp"

// The contract is kernels/_cpu.pyi.
NB_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of Twinplane; see kernels/_cpu.pyi";
  m.attr("ATTENTION_SPLIT") = twinplane::kernels::kAttentionSplit;
  twinplane::kernels::bind_processor(m);
  twinplane::kernels::bind_linear(m);
  twinplane::kernels::bind_attention(m);
  twinplane::kernels::bind_decoder(m);
  twinplane::kernels::bind_elementwise(m);
  twinplane::kernels::bind_sampling(m);
}
