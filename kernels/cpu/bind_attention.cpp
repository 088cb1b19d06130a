#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/cpu/arrays.hpp"
#include "kernels/cpu/attention.hpp"
#include "kernels/cpu/attention_arguments.hpp"
#include "kernels/cpu/bindings.hpp"

namespace nb = nanobind;

namespace twinplane::kernels {
namespace {

void write_kv_py(nb::handle key_object, nb::handle value_object, nb::handle keys_object, nb::handle values_object,
                 nb::handle slots_object) {
  const Array key(key_object, "key");
  const Array value(value_object, "value");
  const Array keys(keys_object, "k_cache");
  const Array values(values_object, "v_cache");
  const Array slots(slots_object, "slots");
  const KvCache cache = cache_of(keys, values);
  const Heads k = heads_of(key, kAny, cache.num_kv_heads, cache.head_dim, "[T, G, D]");
  const int64_t tokens = key.size(0);
  const Heads v = heads_of(value, tokens, cache.num_kv_heads, cache.value_dim, "[T, G, Dv]");
  const int64_t* where = slots_of(slots, tokens, cache);
  const nb::gil_scoped_release unlocked;
  write_kv(Pool::instance(), tokens, k, v, cache, where);
}

// The arguments rope_write_kv and linear_rope_write_kv share, checked.
struct RopeWrite {
  Array cos, sin, keys, values, slots, q_out;
  OptionalArray q_norm, k_norm;
  KvCache cache;
  int64_t num_heads;
  Rotation rotation;
  HeadNorms norms;

  RopeWrite(int64_t heads, int64_t kv_heads, nb::handle cos_object, nb::handle sin_object, nb::handle keys_object,
            nb::handle values_object, nb::handle slots_object, nb::handle q_out_object, const nb::object& q_norm_object,
            const nb::object& k_norm_object, float eps)
      : cos(cos_object, "cos"),
        sin(sin_object, "sin"),
        keys(keys_object, "k_cache"),
        values(values_object, "v_cache"),
        slots(slots_object, "slots"),
        q_out(q_out_object, "q_out"),
        q_norm(q_norm_object, "q_norm"),
        k_norm(k_norm_object, "k_norm"),
        cache(projected_cache_of(keys, values, heads, kv_heads)),
        num_heads(heads) {
    norms = {q_norm.vector(cache.head_dim, "[D]"), k_norm.vector(cache.head_dim, "[D]"), eps};
  }

  int64_t columns() const { return (num_heads + 2 * cache.num_kv_heads) * cache.head_dim; }

  // The rest depends on the number of tokens.
  const int64_t* check_tokens(int64_t tokens) {
    rotation = rotation_of(cos, sin, tokens, cache.head_dim);
    q_out.of({kF32}).shaped({tokens, num_heads, cache.head_dim}, "[T, H, D]").contiguous().writable();
    return slots_of(slots, tokens, cache);
  }

  void run(const Rows& qkv, const int64_t* where) const {
    rope_write_kv(Pool::instance(), qkv, num_heads, rotation, norms, cache, where, q_out.data<float>());
  }
};

void rope_write_kv_py(nb::handle qkv_object, int64_t num_heads, int64_t num_kv_heads, nb::handle cos, nb::handle sin,
                      nb::handle k_cache, nb::handle v_cache, nb::handle slots, nb::handle q_out,
                      const nb::object& q_norm, const nb::object& k_norm, float eps) {
  const Array qkv(qkv_object, "qkv");
  RopeWrite write(num_heads, num_kv_heads, cos, sin, k_cache, v_cache, slots, q_out, q_norm, k_norm, eps);
  qkv.of({kF32}).shaped({kAny, write.columns()}, "[T, (H + 2 G) D]").contiguous_last(1);
  const int64_t* where = write.check_tokens(qkv.size(0));
  const nb::gil_scoped_release unlocked;
  write.run({qkv.data<const float>(), qkv.size(0), write.columns(), qkv.stride(0)}, where);
}

void linear_rope_write_kv_py(nb::handle x_object, const PackedLinear& qkv, int64_t num_heads, int64_t num_kv_heads,
                             nb::handle cos, nb::handle sin, nb::handle k_cache, nb::handle v_cache, nb::handle slots,
                             nb::handle q_out, const nb::object& q_norm, const nb::object& k_norm, float eps) {
  const Array x(x_object, "x");
  RopeWrite write(num_heads, num_kv_heads, cos, sin, k_cache, v_cache, slots, q_out, q_norm, k_norm, eps);
  x.of({kF32}).shaped({kAny, qkv.in_features()}, "[T, K]").contiguous_last(1);
  if (qkv.out_features() != write.columns()) {
    throw nb::value_error(
        ("qkv has " + number(qkv.out_features()) + " output features, (H + 2 G) D is " + number(write.columns()))
            .c_str());
  }
  const int64_t tokens = x.size(0);
  const int64_t* where = write.check_tokens(tokens);
  const nb::gil_scoped_release unlocked;
  static thread_local Scratch buffer;
  const int64_t columns = write.columns();
  float* projected = static_cast<float*>(buffer.reserve(static_cast<size_t>(tokens * columns) * sizeof(float)));
  qkv.run(Pool::instance(), {x.data<const float>(), tokens, qkv.in_features(), x.stride(0)}, {projected, columns},
          nullptr, 0, Activation::kNone);
  write.run({projected, tokens, columns, columns}, where);
}

void rope_py(nb::handle x_object, nb::handle cos_object, nb::handle sin_object, nb::handle out_object) {
  const Array x(x_object, "x");
  const Array cos(cos_object, "cos");
  const Array sin(sin_object, "sin");
  const Array out(out_object, "out");
  const Heads from = heads_of(x, kAny, kAny, kAny, "[T, heads, D]");
  const int64_t tokens = x.size(0);
  const int64_t heads = x.size(1);
  const int64_t dim = x.size(2);
  out.of({kF32}).shaped({tokens, heads, dim}, "[T, heads, D]").contiguous_last(2).writable();
  const Rotation rotation = rotation_of(cos, sin, tokens, dim);
  const nb::gil_scoped_release unlocked;
  Pool::instance().run(tokens, 0, [&](int64_t t, void*) {
    float* to = out.data<float>() + t * out.stride(0);
    std::memmove(to, from.data + t * from.stride, static_cast<size_t>(heads * dim) * sizeof(float));
    active().rotary({.x = to,
                     .heads = heads,
                     .head_dim = dim,
                     .norm = nullptr,
                     .eps = 0,
                     .cos = rotation.cos_of(t),
                     .sin = rotation.sin_of(t),
                     .half = rotation.half});
  });
}

// ---- attention

void paged_attention_py(nb::handle query_object, nb::handle keys_object, nb::handle values_object,
                        nb::handle tables_object, nb::handle contexts_object, nb::handle starts_object,
                        nb::handle out_object, float scale, int64_t sliding_window, float softcap,
                        const nb::object& sinks_object, const nb::object& rows_object) {
  const Array query(query_object, "query");
  const Array keys(keys_object, "k_cache");
  const Array values(values_object, "v_cache");
  const Array tables(tables_object, "block_tables");
  const Array contexts(contexts_object, "context_lens");
  const Array starts(starts_object, "query_start");
  const Array out(out_object, "out");
  const OptionalArray sinks(sinks_object, "sinks");
  const OptionalArray rows(rows_object, "rows");
  const KvCache cache = cache_of(keys, values);
  const Heads q = heads_of(query, kAny, kAny, cache.head_dim, "[T, H, D]");
  const int64_t tokens = query.size(0);
  const int64_t heads = query.size(1);
  if (heads % cache.num_kv_heads != 0) {
    query.fail("has " + number(heads) + " heads, which is no multiple of the " + number(cache.num_kv_heads) +
               " heads of k_cache");
  }
  out.of({kF32}).shaped({tokens, heads, cache.value_dim}, "[T, H, Dv]").contiguous_last(2).writable();
  contexts.of({Dtype::kInt32}).shaped({kAny}, "[S]").contiguous();
  const int64_t sequences = contexts.size(0);
  tables.of({Dtype::kInt32}).shaped({rows.array() ? kAny : sequences, kAny}, "[S, max_blocks]").contiguous_last(1);
  const AttentionBatch batch{.query = q,
                             .num_heads = heads,
                             .num_sequences = sequences,
                             .block_tables = tables.data<const int32_t>(),
                             .table_stride = tables.stride(0),
                             .rows = rows.array() ? int32_vector(*rows.array(), sequences, "[S]") : nullptr,
                             .context_lens = contexts.data<const int32_t>(),
                             .query_start = int32_vector(starts, sequences + 1, "[S + 1]"),
                             .scale = scale,
                             .window = std::max<int64_t>(0, sliding_window),
                             .softcap = softcap,
                             .sinks = sinks.vector(heads, "[H]")};
  check_sequences(batch, cache, tokens, tables, contexts, starts, rows.array());
  const nb::gil_scoped_release unlocked;
  paged_attention(Pool::instance(), batch, cache, {out.data<float>(), out.stride(0)});
}

// ---- block copies

std::vector<int64_t> block_ids(const Array& ids, int64_t count) {
  ids.of({Dtype::kInt32, Dtype::kInt64}).shaped({count}, "[n]").contiguous();
  std::vector<int64_t> blocks;
  for (int64_t i = 0; i < ids.size(0); ++i) {
    blocks.push_back(ids.dtype() == Dtype::kInt32 ? ids.data<const int32_t>()[i] : ids.data<const int64_t>()[i]);
  }
  return blocks;
}

void check_blocks(const Array& ids, const std::vector<int64_t>& blocks, int64_t num_blocks) {
  for (const int64_t block : blocks) {
    if (block < 0 || block >= num_blocks)
      ids.fail("names block " + number(block) + "; a cache has " + number(num_blocks));
  }
}

struct CopyTarget {
  char* data;
  size_t block_bytes;
  size_t stride_bytes;
};

void copy_blocks_py(const nb::sequence& caches, nb::handle sources_object, nb::handle targets_object) {
  const Array sources_array(sources_object, "sources");
  const Array targets_array(targets_object, "targets");
  std::vector<int64_t> sources = block_ids(sources_array, kAny);
  const std::vector<int64_t> targets = block_ids(targets_array, static_cast<int64_t>(sources.size()));
  std::vector<std::unique_ptr<Array>> arrays;
  std::vector<CopyTarget> all;
  for (const nb::handle cache : caches) {
    const Array& array = *arrays.emplace_back(std::make_unique<Array>(cache, "caches"));
    if (array.ndim() < 1) array.fail("holds an array without a block dimension");
    array.contiguous_last(array.ndim() - 1).writable();
    check_blocks(sources_array, sources, array.size(0));
    check_blocks(targets_array, targets, array.size(0));
    const int64_t elements = array.size(0) == 0 ? 0 : array.elements() / array.size(0);
    all.push_back({array.data<char>(), static_cast<size_t>(elements * array.item_bytes()),
                   static_cast<size_t>(array.stride(0) * array.item_bytes())});
  }
  // A block that is both source and target is read through a copy made before anything is written.
  std::vector<bool> staged(sources.size());
  for (size_t i = 0; i < sources.size(); ++i)
    staged[i] = std::find(targets.begin(), targets.end(), sources[i]) != targets.end();
  const nb::gil_scoped_release unlocked;
  Pool::instance().run(static_cast<int64_t>(all.size()), 0, [&](int64_t c, void*) {
    const CopyTarget& cache = all[static_cast<size_t>(c)];
    const auto block = [&](int64_t id) { return cache.data + static_cast<size_t>(id) * cache.stride_bytes; };
    std::vector<std::vector<char>> held(sources.size());
    for (size_t i = 0; i < sources.size(); ++i) {
      if (staged[i]) held[i].assign(block(sources[i]), block(sources[i]) + cache.block_bytes);
    }
    for (size_t i = 0; i < sources.size(); ++i) {
      std::memcpy(block(targets[i]), staged[i] ? held[i].data() : block(sources[i]), cache.block_bytes);
    }
  });
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("write_kv", write_kv_py, nb::arg("key"), nb::arg("value"), nb::arg("k_cache"), nb::arg("v_cache"),
        nb::arg("slots"));
  m.def("rope", rope_py, nb::arg("x"), nb::arg("cos"), nb::arg("sin"), nb::arg("out"));
  m.def("rope_write_kv", rope_write_kv_py, nb::arg("qkv"), nb::arg("num_heads"), nb::arg("num_kv_heads"),
        nb::arg("cos"), nb::arg("sin"), nb::arg("k_cache"), nb::arg("v_cache"), nb::arg("slots"), nb::arg("q_out"),
        nb::arg("q_norm") = nb::none(), nb::arg("k_norm") = nb::none(), nb::arg("eps") = 0.0f);
  m.def("linear_rope_write_kv", linear_rope_write_kv_py, nb::arg("x"), nb::arg("qkv"), nb::arg("num_heads"),
        nb::arg("num_kv_heads"), nb::arg("cos"), nb::arg("sin"), nb::arg("k_cache"), nb::arg("v_cache"),
        nb::arg("slots"), nb::arg("q_out"), nb::arg("q_norm") = nb::none(), nb::arg("k_norm") = nb::none(),
        nb::arg("eps") = 0.0f);
  m.def("paged_attention", paged_attention_py, nb::arg("query"), nb::arg("k_cache"), nb::arg("v_cache"),
        nb::arg("block_tables"), nb::arg("context_lens"), nb::arg("query_start"), nb::arg("out"), nb::arg("scale"),
        nb::arg("sliding_window") = 0, nb::arg("softcap") = 0.0f, nb::arg("sinks") = nb::none(),
        nb::arg("rows") = nb::none());
  m.def("copy_blocks", copy_blocks_py, nb::arg("caches"), nb::arg("sources"), nb::arg("targets"));
}

}  // namespace twinplane::kernels
