#include <algorithm>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels/cpu/arrays.hpp"
#include "kernels/cpu/attention.hpp"
#include "kernels/cpu/bindings.hpp"
#include "kernels/cpu/linear.hpp"

namespace nb = nanobind;

namespace twinplane::kernels {
namespace {

constexpr Dtype kF32 = Dtype::kFloat32;

const char* kind_name(WeightKind kind) {
  switch (kind) {
    case WeightKind::kFloat32:
      return "float32";
    case WeightKind::kBfloat16:
      return "bfloat16";
    case WeightKind::kQ8_0:
      return "Q8_0";
    case WeightKind::kQ4_0:
      return "Q4_0";
    case WeightKind::kQ4_1:
      return "Q4_1";
    case WeightKind::kQ5_0:
      return "Q5_0";
    case WeightKind::kQ5_1:
      return "Q5_1";
    case WeightKind::kQ4_K:
      return "Q4_K";
    case WeightKind::kQ5_K:
      return "Q5_K";
    case WeightKind::kQ6_K:
      return "Q6_K";
  }
  return "";
}

// Those of the parts in order, each once: "Q4_K+Q6_K".
std::string kind_names(const PackedLinear& linear) {
  std::string names;
  std::vector<WeightKind> seen;
  for (const WeightKind kind : linear.kinds()) {
    if (std::find(seen.begin(), seen.end(), kind) != seen.end()) continue;
    seen.push_back(kind);
    names += (names.empty() ? "" : "+") + std::string(kind_name(kind));
  }
  return names;
}

WeightKind parse_kind(const std::string& name, std::initializer_list<WeightKind> known) {
  std::string names;
  for (const WeightKind kind : known) {
    if (name == kind_name(kind)) return kind;
    names += (names.empty() ? "" : ", ") + std::string(kind_name(kind));
  }
  throw nb::value_error(("kind must be one of " + names + ", got " + name).c_str());
}

Activations parse_activations(const std::string& name) {
  if (name == "float") return Activations::kFloat;
  if (name == "int8") return Activations::kInt8;
  throw nb::value_error(("activations must be float or int8, got " + name).c_str());
}

WeightKind parse_storage(const nb::object& dtype, Dtype own) {
  if (dtype.is_none()) return own == Dtype::kBf16 ? WeightKind::kBfloat16 : WeightKind::kFloat32;
  const std::string name = nb::cast<std::string>(nb::str(dtype));
  if (name == "float32") return WeightKind::kFloat32;
  if (name == "bfloat16") return WeightKind::kBfloat16;
  throw nb::value_error(("dtype must be float32 or bfloat16, got " + name).c_str());
}

// The optional bias of `out` features.
class Bias {
 public:
  Bias(const nb::object& object, int64_t out) {
    if (object.is_none()) return;
    array_.emplace(object, "bias");
    array_->of({kF32}).shaped({out}, "[N]").contiguous();
  }
  const float* data() const { return array_ ? array_->data<const float>() : nullptr; }

 private:
  std::optional<Array> array_;
};

PackedLinear pack(nb::handle weight, const nb::object& bias, const nb::object& dtype) {
  const Array w(weight, "weight");
  w.of({kF32, Dtype::kBf16}).shaped({kAny, kAny}, "[N, K]").contiguous_last(1);
  const Bias b(bias, w.size(0));
  const WeightKind storage = parse_storage(dtype, w.dtype());
  const nb::gil_scoped_release unlocked;
  if (w.dtype() == kF32)
    return PackedLinear::from_float(w.data<const float>(), w.stride(0), w.size(0), w.size(1), storage, b.data());
  return PackedLinear::from_bf16(w.data<const Bf16>(), w.stride(0), w.size(0), w.size(1), storage, b.data());
}

PackedLinear pack_gguf(nb::handle blocks, const std::string& kind_text, const nb::object& bias,
                       const std::string& activations_text) {
  const WeightKind kind =
      parse_kind(kind_text, {WeightKind::kQ8_0, WeightKind::kQ4_0, WeightKind::kQ4_1, WeightKind::kQ5_0,
                             WeightKind::kQ5_1, WeightKind::kQ4_K, WeightKind::kQ5_K, WeightKind::kQ6_K});
  const Activations activations = parse_activations(activations_text);
  const Array b(blocks, "blocks");
  b.of({Dtype::kUint8}).shaped({kAny, kAny}, "[N, bytes of a row's blocks]").contiguous();
  const int64_t block_bytes = static_cast<int64_t>(gguf_block_bytes(kind));
  if (b.size(1) % block_bytes != 0) {
    b.fail("has lines of " + std::to_string(b.size(1)) + " bytes, which is no multiple of the " +
           std::to_string(block_bytes) + " bytes of a " + kind_text + " block");
  }
  const Bias bias_values(bias, b.size(0));
  const nb::gil_scoped_release unlocked;
  return PackedLinear::from_gguf(b.data<const uint8_t>(), b.size(0), b.size(1) / block_bytes * gguf_block_weights(kind),
                                 kind, bias_values.data(), activations);
}

PackedLinear quantize(nb::handle weight, const std::string& kind_text, const nb::object& bias,
                      const std::string& activations_text) {
  const WeightKind kind = parse_kind(kind_text, {WeightKind::kQ8_0, WeightKind::kQ4_0, WeightKind::kQ4_1});
  const Activations activations = parse_activations(activations_text);
  const Array w(weight, "weight");
  w.of({kF32}).shaped({kAny, kAny}, "[N, K]").contiguous_last(1);
  if (w.size(1) % kGroup != 0)
    w.fail("has " + std::to_string(w.size(1)) + " columns; " + kind_text + " needs a multiple of 32");
  const Bias bias_values(bias, w.size(0));
  const nb::gil_scoped_release unlocked;
  const int64_t groups = w.size(1) / kGroup;
  const int64_t line = groups * static_cast<int64_t>(gguf_block_bytes(kind));
  std::vector<uint8_t> blocks(static_cast<size_t>(w.size(0) * line));
  Pool::instance().run(w.size(0), 0, [&](int64_t row, void*) {
    quantize_gguf(w.data<const float>() + row * w.stride(0), groups, kind, blocks.data() + row * line);
  });
  return PackedLinear::from_gguf(blocks.data(), w.size(0), w.size(1), kind, bias_values.data(), activations);
}

PackedLinear concat(const std::vector<const PackedLinear*>& parts) {
  try {
    return PackedLinear::concat(parts);
  } catch (const std::invalid_argument& error) {
    throw nb::value_error(error.what());
  }
}

Rows rows_of(const Array& x, int64_t columns) {
  x.of({kF32}).shaped({kAny, columns}, "[T, K]").contiguous_last(1);
  return {x.data<const float>(), x.size(0), columns, x.stride(0)};
}

MutableRows output_of(const Array& out, int64_t rows, int64_t columns, const Array& x) {
  out.of({kF32}).shaped({rows, columns}, "[T, N]").contiguous_last(1).writable();
  if (out.extent().overlaps(x.extent())) out.fail("overlaps x, which is still read while out is written");
  return {out.data<float>(), out.stride(0)};
}

void call(const PackedLinear& self, nb::handle x_object, nb::handle out_object, const nb::object& residual_object,
          const std::string& activation_name) {
  const Activation activation = parse_activation(activation_name);
  const Array x(x_object, "x");
  const Array out(out_object, "out");
  const Rows rows = rows_of(x, self.in_features());
  const MutableRows target = output_of(out, rows.rows, self.out_features(), x);
  if (residual_object.is_none()) {
    const nb::gil_scoped_release unlocked;
    return self.run(Pool::instance(), rows, target, nullptr, 0, activation);
  }
  const Array residual(residual_object, "residual");
  residual.of({kF32}).shaped({rows.rows, self.out_features()}, "[T, N]").contiguous_last(1);
  const bool same = residual.data<float>() == target.data && residual.stride(0) == target.stride;
  if (!same && residual.extent().overlaps(out.extent())) residual.fail("overlaps out without being the same array");
  const nb::gil_scoped_release unlocked;
  self.run(Pool::instance(), rows, target, residual.data<const float>(), residual.stride(0), activation);
}

template <class Id>
void gather_rows(const PackedLinear& self, const Array& ids, const Array& out) {
  for (int64_t i = 0; i < ids.size(0); ++i) {
    const int64_t id = ids.data<const Id>()[i];
    if (id < 0 || id >= self.out_features()) {
      ids.fail("[" + std::to_string(i) + "] is " + std::to_string(id) + "; the weight has rows 0 to " +
               std::to_string(self.out_features() - 1));
    }
  }
  const nb::gil_scoped_release unlocked;
  Pool::instance().run(ids.size(0), 0, [&](int64_t i, void*) {
    self.unpack_row(ids.data<const Id>()[i], out.data<float>() + i * out.stride(0));
  });
}

void gather(const PackedLinear& self, nb::handle ids_object, nb::handle out_object) {
  const Array ids(ids_object, "ids");
  const Array out(out_object, "out");
  ids.of({Dtype::kInt32, Dtype::kInt64}).shaped({kAny}, "[T]").contiguous();
  out.of({kF32}).shaped({ids.size(0), self.in_features()}, "[T, K]").contiguous_last(1).writable();
  if (ids.dtype() == Dtype::kInt32) {
    gather_rows<int32_t>(self, ids, out);
  } else {
    gather_rows<int64_t>(self, ids, out);
  }
}

void linear_gated(nb::handle x_object, const PackedLinear& gate_up, nb::handle out_object,
                  const std::string& activation_name) {
  const Activation activation = parse_activation(activation_name);
  if (gate_up.out_features() % 2 != 0) {
    throw nb::value_error(
        ("gate_up has " + std::to_string(gate_up.out_features()) + " output features, an odd number").c_str());
  }
  const Array x(x_object, "x");
  const Array out(out_object, "out");
  const Rows rows = rows_of(x, gate_up.in_features());
  const MutableRows target = output_of(out, rows.rows, gate_up.out_features() / 2, x);
  const nb::gil_scoped_release unlocked;
  gate_up.run_gated(Pool::instance(), rows, target, activation);
}

}  // namespace

Activation parse_activation(const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "relu") return Activation::kRelu;
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  throw nb::value_error(("activation must be none, relu, silu, gelu or gelu_tanh, got " + name).c_str());
}

void bind_linear(nb::module_& m) {
  nb::class_<PackedLinear>(m, "PackedLinear")
      .def(
          "__init__",
          [](PackedLinear* self, nb::handle weight, const nb::object& bias, const nb::object& dtype) {
            new (self) PackedLinear(pack(weight, bias, dtype));
          },
          nb::arg("weight"), nb::arg("bias") = nb::none(), nb::arg("dtype") = nb::none())
      .def_static("from_gguf", pack_gguf, nb::arg("blocks"), nb::arg("kind"), nb::arg("bias") = nb::none(),
                  nb::arg("activations") = "float")
      .def_static("quantize", quantize, nb::arg("weight"), nb::arg("kind"), nb::arg("bias") = nb::none(),
                  nb::arg("activations") = "float")
      .def_static("concat", concat, nb::arg("parts"))
      .def_prop_ro("out_features", &PackedLinear::out_features)
      .def_prop_ro("in_features", &PackedLinear::in_features)
      .def_prop_ro("kind", kind_names)
      .def_prop_ro("activations", [](const PackedLinear& self) { return self.integer() ? "int8" : "float"; })
      .def_prop_ro("nbytes", &PackedLinear::nbytes)
      .def_prop_ro("isa", &PackedLinear::isa)
      .def("__call__", call, nb::arg("x"), nb::arg("out"), nb::arg("residual") = nb::none(),
           nb::arg("activation") = "none")
      .def("gather", gather, nb::arg("ids"), nb::arg("out"));
  m.def("linear_gated", linear_gated, nb::arg("x"), nb::arg("gate_up"), nb::arg("out"), nb::arg("activation") = "silu");
}

}  // namespace twinplane::kernels
