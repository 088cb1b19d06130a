#include "kernels/cpu/arrays.hpp"
#include "kernels/cpu/bindings.hpp"
#include "kernels/cpu/pool.hpp"
#include "kernels/cpu/sampling.hpp"

namespace nb = nanobind;

namespace twinplane::kernels {
namespace {

template <class T>
const T* column(const Array& x, Dtype dtype, int64_t rows) {
  return x.of({dtype}).shaped({rows}, "[T]").contiguous().data<const T>();
}

void sample(nb::handle logits_object, nb::handle temperature_object, nb::handle top_k_object, nb::handle top_p_object,
            nb::handle min_p_object, nb::handle uniforms_object, nb::handle out_object) {
  const Array logits(logits_object, "logits");
  const Array temperatures(temperature_object, "temperature");
  const Array top_ks(top_k_object, "top_k");
  const Array top_ps(top_p_object, "top_p");
  const Array min_ps(min_p_object, "min_p");
  const Array uniforms(uniforms_object, "uniforms");
  const Array out(out_object, "out");
  logits.of({Dtype::kFloat32}).shaped({kAny, kAny}, "[T, V]").contiguous_last(1);
  const int64_t rows = logits.size(0);
  const int64_t vocab = logits.size(1);
  if (vocab == 0) logits.fail("has no columns");
  const auto* temperature = column<float>(temperatures, Dtype::kFloat32, rows);
  const auto* top_k = column<int64_t>(top_ks, Dtype::kInt64, rows);
  const auto* top_p = column<float>(top_ps, Dtype::kFloat32, rows);
  const auto* min_p = column<float>(min_ps, Dtype::kFloat32, rows);
  const auto* uniform = column<float>(uniforms, Dtype::kFloat32, rows);
  out.of({Dtype::kInt32}).shaped({rows}, "[T]").contiguous().writable();
  const nb::gil_scoped_release unlocked;
  Pool::instance().run(rows, 0, [&](int64_t row, void*) {
    const Draw draw{.temperature = temperature[row],
                    .top_k = top_k[row],
                    .top_p = top_p[row],
                    .min_p = min_p[row],
                    .uniform = uniform[row]};
    out.data<int32_t>()[row] = draw_token(logits.data<const float>() + row * logits.stride(0), vocab, draw);
  });
}

void uniforms(nb::handle seeds_object, nb::handle streams_object, nb::handle positions_object, nb::handle out_object) {
  const Array seeds(seeds_object, "seeds");
  const Array streams(streams_object, "streams");
  const Array positions(positions_object, "positions");
  const Array out(out_object, "out");
  const int64_t rows = out.ndim() > 0 ? out.size(0) : 0;
  const auto* seed = column<int64_t>(seeds, Dtype::kInt64, rows);
  const auto* stream = column<int64_t>(streams, Dtype::kInt64, rows);
  const auto* position = column<int64_t>(positions, Dtype::kInt64, rows);
  out.of({Dtype::kFloat32}).shaped({rows}, "[T]").contiguous().writable();
  for (int64_t row = 0; row < rows; ++row) {
    out.data<float>()[row] = uniform(static_cast<uint64_t>(seed[row]), static_cast<uint32_t>(stream[row]),
                                     static_cast<uint32_t>(position[row]));
  }
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("sample", sample, nb::arg("logits"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"),
        nb::arg("min_p"), nb::arg("uniforms"), nb::arg("out"));
  m.def("uniforms", uniforms, nb::arg("seeds"), nb::arg("streams"), nb::arg("positions"), nb::arg("out"));
}

}  // namespace twinplane::kernels
