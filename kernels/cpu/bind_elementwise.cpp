#include <nanobind/stl/string.h>

#include "kernels/cpu/arrays.hpp"
#include "kernels/cpu/bindings.hpp"
#include "kernels/cpu/elementwise.hpp"
#include "kernels/cpu/pool.hpp"

namespace nb = nanobind;

namespace twinplane::kernels {
namespace {

constexpr Dtype kF32 = Dtype::kFloat32;

const Array& matrix(const Array& x, int64_t rows, int64_t columns) {
  return x.of({kF32}).shaped({rows, columns}, "[T, dim]").contiguous_last(1);
}

const float* vector(const Array& x, int64_t length) {
  return x.of({kF32}).shaped({length}, "[dim]").contiguous().data<const float>();
}

void rms_norm_py(nb::handle x_object, nb::handle weight_object, float eps, nb::handle out_object) {
  const Array x(x_object, "x");
  const Array weight(weight_object, "weight");
  const Array out(out_object, "out");
  matrix(x, kAny, kAny);
  const int64_t dim = x.size(1);
  const float* w = vector(weight, dim);
  matrix(out, x.size(0), dim).writable();
  const nb::gil_scoped_release unlocked;
  rms_norm(Pool::instance(), {x.data<const float>(), x.size(0), dim, x.stride(0)}, w, eps,
           {out.data<float>(), out.stride(0)});
}

void add_rms_norm(nb::handle x_object, nb::handle residual_object, nb::handle weight_object, float eps,
                  nb::handle out_object) {
  const Array x(x_object, "x");
  const Array residual(residual_object, "residual");
  const Array weight(weight_object, "weight");
  const Array out(out_object, "out");
  matrix(x, kAny, kAny);
  const int64_t dim = x.size(1);
  const float* w = vector(weight, dim);
  matrix(residual, x.size(0), dim).writable();
  matrix(out, x.size(0), dim).writable();
  const nb::gil_scoped_release unlocked;
  for_rows(Pool::instance(), x.size(0), dim, [&](int64_t row) {
    active().add_rms_norm(x.data<const float>() + row * x.stride(0), residual.data<float>() + row * residual.stride(0),
                          w, eps, out.data<float>() + row * out.stride(0), dim);
  });
}

void layer_norm(nb::handle x_object, nb::handle weight_object, nb::handle bias_object, float eps,
                nb::handle out_object) {
  const Array x(x_object, "x");
  const Array weight(weight_object, "weight");
  const Array bias(bias_object, "bias");
  const Array out(out_object, "out");
  matrix(x, kAny, kAny);
  const int64_t dim = x.size(1);
  const float* w = vector(weight, dim);
  const float* b = vector(bias, dim);
  matrix(out, x.size(0), dim).writable();
  const nb::gil_scoped_release unlocked;
  for_rows(Pool::instance(), x.size(0), dim, [&](int64_t row) {
    active().layer_norm(x.data<const float>() + row * x.stride(0), w, b, eps, out.data<float>() + row * out.stride(0),
                        dim);
  });
}

void gated(nb::handle gate_up_object, nb::handle out_object, const std::string& activation_name) {
  const Activation activation = parse_activation(activation_name);
  const Array gate_up(gate_up_object, "gate_up");
  const Array out(out_object, "out");
  matrix(gate_up, kAny, kAny);
  if (gate_up.size(1) % 2 != 0) gate_up.fail("has an odd number of columns: " + std::to_string(gate_up.size(1)));
  const int64_t half = gate_up.size(1) / 2;
  matrix(out, gate_up.size(0), half).writable();
  const nb::gil_scoped_release unlocked;
  for_rows(Pool::instance(), gate_up.size(0), 2 * half, [&](int64_t row) {
    const float* line = gate_up.data<const float>() + row * gate_up.stride(0);
    active().gated_epilogue({.gate = line,
                             .up = line + half,
                             .acc_stride = gate_up.stride(0),
                             .rows = 1,
                             .columns = half,
                             .gate_bias = nullptr,
                             .up_bias = nullptr,
                             .out = out.data<float>() + row * out.stride(0),
                             .out_stride = out.stride(0),
                             .activation = activation});
  });
}

void argmax(nb::handle logits_object, nb::handle out_object) {
  const Array logits(logits_object, "logits");
  const Array out(out_object, "out");
  matrix(logits, kAny, kAny);
  if (logits.size(1) == 0) logits.fail("has no columns");
  out.of({Dtype::kInt32}).shaped({logits.size(0)}, "[T]").contiguous().writable();
  const nb::gil_scoped_release unlocked;
  for_rows(Pool::instance(), logits.size(0), logits.size(1), [&](int64_t row) {
    out.data<int32_t>()[row] =
        static_cast<int32_t>(active().argmax(logits.data<const float>() + row * logits.stride(0), logits.size(1)));
  });
}

}  // namespace

void bind_elementwise(nb::module_& m) {
  m.def("rms_norm", rms_norm_py, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"));
  m.def("add_rms_norm", add_rms_norm, nb::arg("x"), nb::arg("residual"), nb::arg("weight"), nb::arg("eps"),
        nb::arg("out"));
  m.def("layer_norm", layer_norm, nb::arg("x"), nb::arg("weight"), nb::arg("bias"), nb::arg("eps"), nb::arg("out"));
  m.def("gated", gated, nb::arg("gate_up"), nb::arg("out"), nb::arg("activation") = "silu");
  m.def("argmax", argmax, nb::arg("logits"), nb::arg("out"));
}

}  // namespace twinplane::kernels
