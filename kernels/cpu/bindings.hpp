// The Python module is bound in parts, one file each.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "kernels/cpu/kernels.hpp"

namespace twinplane::kernels {

void bind_linear(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_decoder(nanobind::module_& m);
void bind_elementwise(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_processor(nanobind::module_& m);

// Raises ValueError for an unknown name.
Activation parse_activation(const std::string& name);

}  // namespace twinplane::kernels
