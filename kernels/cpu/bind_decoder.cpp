#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/attention_arguments.hpp"
#include "kernels/cpu/bindings.hpp"
#include "kernels/cpu/decoder.hpp"

namespace nb = nanobind;

namespace twinplane::kernels {
namespace {

// A field of a Python object. Its name is interned: looking it up compares pointers.
class Field {
 public:
  explicit Field(const char* name) : name_(name), interned_(PyUnicode_InternFromString(name)) {}

  const char* name() const { return name_; }

  nb::object of(nb::handle object) const {
    PyObject* value = PyObject_GetAttr(object.ptr(), interned_);
    if (value == nullptr) throw nb::python_error();
    return nb::steal(value);
  }

  template <class Number>
  Number number_of(nb::handle object) const {
    const nb::object value = of(object);
    Number number{};
    if (!nb::try_cast<Number>(value, number)) {
      throw nb::type_error((std::string(name_) + " must be a number, not " + Py_TYPE(value.ptr())->tp_name).c_str());
    }
    return number;
  }

 private:
  const char* name_;
  PyObject* interned_;  // lives as long as the process
};

// Of kernels/decoder.py.
struct Fields {
  const Field input_norm{"input_norm"}, qkv{"qkv"}, q_norm{"q_norm"}, k_norm{"k_norm"}, output{"output"},
      mlp_norm{"mlp_norm"}, gate_up{"gate_up"}, down{"down"}, window{"window"};
  const Field num_heads{"num_heads"}, num_kv_heads{"num_kv_heads"}, scale{"scale"}, eps{"eps"}, cos{"cos"}, sin{"sin"},
      positions{"positions"}, slots{"slots"}, block_tables{"block_tables"}, context_lens{"context_lens"},
      query_start{"query_start"};
  const Field embedding{"embedding"}, layers{"layers"}, norm{"norm"}, head{"head"};

  static const Fields& all() {
    static const Fields fields;
    return fields;
  }
};

// An array in a field.
class FieldArray {
 public:
  FieldArray(nb::handle object, const Field& field) : held_(field.of(object)), array_(held_, field.name()) {}
  const Array& operator*() const { return array_; }
  const Array* operator->() const { return &array_; }

 private:
  nb::object held_;
  Array array_;
};

// The argument `step`, of `tokens` tokens.
class StepArguments {
 public:
  StepArguments(nb::handle step, int64_t tokens, int64_t hidden)
      : cos_(step, Fields::all().cos),
        sin_(step, Fields::all().sin),
        positions_(step, Fields::all().positions),
        slots_(step, Fields::all().slots),
        tables_(step, Fields::all().block_tables),
        contexts_(step, Fields::all().context_lens),
        starts_(step, Fields::all().query_start),
        num_kv_heads_(Fields::all().num_kv_heads.number_of<int64_t>(step)) {
    contexts_->of({Dtype::kInt32}).shaped({kAny}, "[S]").contiguous();
    const int64_t sequences = contexts_->size(0);
    tables_->of({Dtype::kInt32}).shaped({sequences, kAny}, "[S, max_blocks]").contiguous_last(1);
    view_ = {.tokens = tokens,
             .hidden = hidden,
             .eps = Fields::all().eps.number_of<float>(step),
             .rotation = {},
             .slots = nullptr,
             .attention = {.query = {},
                           .num_heads = Fields::all().num_heads.number_of<int64_t>(step),
                           .num_sequences = sequences,
                           .block_tables = tables_->data<const int32_t>(),
                           .table_stride = tables_->stride(0),
                           .rows = nullptr,
                           .context_lens = contexts_->data<const int32_t>(),
                           .query_start = int32_vector(*starts_, sequences + 1, "[S + 1]"),
                           .scale = Fields::all().scale.number_of<float>(step),
                           .window = 0,
                           .softcap = 0,
                           .sinks = nullptr}};
  }

  const DecoderStep& view() const { return view_; }
  int64_t num_heads() const { return view_.attention.num_heads; }
  int64_t num_kv_heads() const { return num_kv_heads_; }

  // What is asked of the step depends on the layer's cache and window; asked once for layers that have the same.
  void fit(const KvCache& cache, int64_t window) {
    const Fit fit{cache.num_blocks, cache.block_size, cache.head_dim, window};
    if (std::find(fits_.begin(), fits_.end(), fit) != fits_.end()) return;
    if (num_heads() % cache.num_kv_heads != 0) {
      throw nb::value_error(("num_heads is " + number(num_heads()) + ", which is no multiple of the " +
                             number(cache.num_kv_heads) + " heads of k_cache")
                                .c_str());
    }
    view_.rotation = rotation_at(*cos_, *sin_, *positions_, view_.tokens, cache.head_dim);
    view_.slots = slots_of(*slots_, view_.tokens, cache);
    AttentionBatch attention = view_.attention;
    attention.window = window;
    check_sequences(attention, cache, view_.tokens, *tables_, *contexts_, *starts_, std::nullopt);
    fits_.push_back(fit);
  }

 private:
  struct Fit {
    int64_t num_blocks, block_size, head_dim, window;
    bool operator==(const Fit&) const = default;
  };

  FieldArray cos_, sin_, positions_, slots_, tables_, contexts_, starts_;
  int64_t num_kv_heads_;
  DecoderStep view_;
  std::vector<Fit> fits_;
};

// The weights, each layer's with its cache. Holds what it points to.
class WeightArguments {
 public:
  // The layers, checked against a step; the argument at fault is named after the layer.
  void add_layers(const nb::sequence& layers, const nb::sequence& k_caches, const nb::sequence& v_caches,
                  StepArguments& step) {
    const size_t count = nb::len(layers);
    if (nb::len(k_caches) != count || nb::len(v_caches) != count) {
      throw nb::value_error((std::to_string(count) + " layers have " + std::to_string(nb::len(k_caches)) +
                             " k_caches and " + std::to_string(nb::len(v_caches)) + " v_caches")
                                .c_str());
    }
    held_.reserve(held_.size() + count * (2 + 8));
    decoder_.layers.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      try {
        add_layer(layers[i], k_caches[i], v_caches[i], step);
      } catch (const nb::builtin_exception& error) {
        throw nb::builtin_exception(error.type(), ("layer " + std::to_string(i) + ": " + error.what()).c_str());
      }
    }
  }

  // What lies before and after the layers.
  void add_ends(nb::handle decoder) {
    const Fields& fields = Fields::all();
    decoder_.embedding = &linear(decoder, fields.embedding);
    const int64_t hidden = decoder_.embedding->in_features();
    decoder_.norm = vector(decoder, fields.norm, hidden, "[hidden]");
    decoder_.head = &linear(decoder, fields.head, hidden);
  }

  const Decoder& view() const { return decoder_; }

 private:
  nb::handle hold(nb::object object) { return held_.emplace_back(std::move(object)); }

  void add_layer(const nb::object& layer, nb::object k_cache, nb::object v_cache, StepArguments& step) {
    const Fields& fields = Fields::all();
    const int64_t hidden = step.view().hidden;
    const Array keys(hold(std::move(k_cache)), "k_cache");
    const Array values(hold(std::move(v_cache)), "v_cache");
    const KvCache cache = projected_cache_of(keys, values, step.num_heads(), step.num_kv_heads());
    const int64_t window = std::max<int64_t>(0, fields.window.number_of<int64_t>(layer));
    step.fit(cache, window);

    const PackedLinear& qkv = linear(layer, fields.qkv, hidden);
    const int64_t projected = (step.num_heads() + 2 * cache.num_kv_heads) * cache.head_dim;
    if (qkv.out_features() != projected) {
      throw nb::value_error(
          ("qkv has " + number(qkv.out_features()) + " output features, (H + 2 G) D is " + number(projected)).c_str());
    }
    const PackedLinear& output = linear(layer, fields.output, step.num_heads() * cache.head_dim, hidden);
    const PackedLinear& gate_up = linear(layer, fields.gate_up, hidden);
    if (gate_up.out_features() % 2 != 0) {
      throw nb::value_error(
          ("gate_up has " + number(gate_up.out_features()) + " output features, an odd number").c_str());
    }
    decoder_.layers.push_back(
        {.input_norm = vector(layer, fields.input_norm, hidden, "[hidden]"),
         .qkv = &qkv,
         .head_norms = {optional_vector(layer, fields.q_norm, cache.head_dim, "[D]"),
                        optional_vector(layer, fields.k_norm, cache.head_dim, "[D]"), step.view().eps},
         .output = &output,
         .mlp_norm = vector(layer, fields.mlp_norm, hidden, "[hidden]"),
         .gate_up = &gate_up,
         .down = &linear(layer, fields.down, gate_up.out_features() / 2, hidden),
         .window = window,
         .cache = cache});
  }

  const PackedLinear& linear(nb::handle layer, const Field& field, int64_t in = kAny, int64_t out = kAny) {
    const nb::handle object = hold(field.of(layer));
    const PackedLinear* packed = nullptr;
    if (!nb::try_cast(object, packed, false) || packed == nullptr) {
      throw nb::type_error(
          (std::string(field.name()) + " must be a PackedLinear, not " + Py_TYPE(object.ptr())->tp_name).c_str());
    }
    if ((in != kAny && packed->in_features() != in) || (out != kAny && packed->out_features() != out)) {
      const int64_t want[] = {out, in};
      const int64_t got[] = {packed->out_features(), packed->in_features()};
      throw nb::value_error(
          (std::string(field.name()) + " must be [N, K] = " + shape_text(want, 2) + ", got " + shape_text(got, 2))
              .c_str());
    }
    return *packed;
  }

  const float* vector(nb::handle layer, const Field& field, int64_t length, const char* letters) {
    const Array array(hold(field.of(layer)), field.name());
    return array.of({kF32}).shaped({length}, letters).contiguous().data<const float>();
  }

  const float* optional_vector(nb::handle layer, const Field& field, int64_t length, const char* letters) {
    return OptionalArray(hold(field.of(layer)), field.name()).vector(length, letters);
  }

  std::vector<nb::object> held_;
  Decoder decoder_ = {};
};

void decoder_layers_py(nb::handle residual_object, const nb::sequence& layers, nb::handle step_object,
                       const nb::sequence& k_caches, const nb::sequence& v_caches) {
  const Array residual(residual_object, "residual");
  residual.of({kF32}).shaped({kAny, kAny}, "[T, hidden]").contiguous_last(1).writable();
  StepArguments step(step_object, residual.size(0), residual.size(1));
  WeightArguments weights;
  weights.add_layers(layers, k_caches, v_caches, step);
  const nb::gil_scoped_release unlocked;
  decoder_layers(Pool::instance(), weights.view().layers, step.view(), {residual.data<float>(), residual.stride(0)});
}

// [n], each the number of one of `limit` things.
const int64_t* numbers_of(const Array& x, int64_t limit, const char* letters, const char* things) {
  x.of({Dtype::kInt64}).shaped({kAny}, letters).contiguous();
  const int64_t* data = x.data<const int64_t>();
  for (int64_t i = 0; i < x.size(0); ++i) {
    if (data[i] < 0 || data[i] >= limit)
      x.fail("[" + number(i) + "] is " + number(data[i]) + "; there are " + number(limit) + " " + things);
  }
  return data;
}

void decoder_logits_py(nb::handle decoder, nb::handle token_ids_object, nb::handle step_object,
                       nb::handle sample_tokens_object, const nb::sequence& k_caches, const nb::sequence& v_caches,
                       nb::handle out_object) {
  const Array token_ids(token_ids_object, "token_ids");
  const Array sample_tokens(sample_tokens_object, "sample_tokens");
  const Array out(out_object, "out");
  WeightArguments weights;
  weights.add_ends(decoder);
  const Decoder& view = weights.view();
  const int64_t* ids = numbers_of(token_ids, view.embedding->out_features(), "[T]", "rows of the embedding");
  const int64_t tokens = token_ids.size(0);
  const int64_t* sampling = numbers_of(sample_tokens, tokens, "[R]", "tokens");
  const int64_t samples = sample_tokens.size(0);
  out.of({kF32}).shaped({samples, view.head->out_features()}, "[R, vocabulary]").contiguous_last(1).writable();
  StepArguments step(step_object, tokens, view.embedding->in_features());
  weights.add_layers(nb::cast<nb::sequence>(Fields::all().layers.of(decoder)), k_caches, v_caches, step);
  const nb::gil_scoped_release unlocked;
  decoder_logits(Pool::instance(), view, step.view(), ids, samples, sampling, {out.data<float>(), out.stride(0)});
}

}  // namespace

void bind_decoder(nb::module_& m) {
  m.def("decoder_layers", decoder_layers_py, nb::arg("residual"), nb::arg("layers"), nb::arg("step"),
        nb::arg("k_caches"), nb::arg("v_caches"));
  m.def("decoder_logits", decoder_logits_py, nb::arg("decoder"), nb::arg("token_ids"), nb::arg("step"),
        nb::arg("sample_tokens"), nb::arg("k_caches"), nb::arg("v_caches"), nb::arg("out"));
}

}  // namespace twinplane::kernels
