// All kernels of one instruction set and their table. TWINPLANE_ISA names the namespace; its simd_*.hpp is included
// before. Contraction of a * b + c is off (-ffp-contract=off): where products are fused is written, not left to the
// vectorizer, whose choice may differ between the body and the tail of a loop.
#include <math.h>

#include "kernels/cpu/formats.hpp"
#include "kernels/cpu/half.hpp"
#include "kernels/cpu/kernels.hpp"

// In this order: each uses what the ones before it define.
#include "kernels/cpu/unroll.inl"

#include "kernels/cpu/exponential.inl"

#include "kernels/cpu/elementwise.inl"

#include "kernels/cpu/sampling.inl"

#include "kernels/cpu/panels.inl"

#include "kernels/cpu/dense.inl"

#include "kernels/cpu/quantized_group.inl"

#include "kernels/cpu/quantized.inl"

#include "kernels/cpu/linear.inl"

#include "kernels/cpu/attention_keys.inl"

#include "kernels/cpu/attention_strips.inl"

#include "kernels/cpu/attention.inl"

namespace twinplane::kernels::TWINPLANE_ISA {

extern const Kernels kTable;
const Kernels kTable = {
    .name = kName,
    .panel_columns = kPanelColumns,
    .strip_rows = kStripRows,
    .panel_product = panel_product,
    .split_activations = nullptr,
    .integer_product = integer_product,
    .after_job = nullptr,
    .quantize_activations = quantize_activations,
    .linear_epilogue = linear_epilogue,
    .gated_epilogue = gated_epilogue,
    .attention_scratch = attention_scratch,
    .attention_query = attention_query,
    .attention_partition = attention_partition,
    .attention_merge = attention_merge,
    .attention_finish = attention_finish,
    .rms_norm = rms_norm,
    .add_rms_norm = add_rms_norm,
    .layer_norm = layer_norm,
    .rotary = rotary,
    .write_key = write_key,
    .write_value = write_value,
    .greatest_logit = greatest_logit,
    .argmax = argmax,
    .weigh = weigh,
    .sum = sum,
    .sum_plain = sum_plain,
    .fma_chain = fma_chain,
};

}  // namespace twinplane::kernels::TWINPLANE_ISA
