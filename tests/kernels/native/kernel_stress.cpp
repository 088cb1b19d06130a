// The CPU kernels under the sanitizers: every instruction set, odd sizes at the very end of exactly sized buffers (the
// address sanitizer sees one element too many), and the pool used and resized by several threads (the thread sanitizer
// sees a missing ordering). Results are compared to the bit between batch sizes. Aborts on the first thing that is
// wrong.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "kernels/cpu/attention.hpp"
#include "kernels/cpu/decoder.hpp"
#include "kernels/cpu/kernels.hpp"
#include "kernels/cpu/linear.hpp"
#include "kernels/cpu/pool.hpp"
#include "kernels/cpu/sampling.hpp"

namespace kernels = twinplane::kernels;
using kernels::WeightKind;
using Floats = std::vector<float>;

namespace {

void check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "FAILED (%s): %s\n", kernels::active().name, what);
  std::abort();
}

Floats random_floats(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Floats values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

// K-quants of any numbers and scales; the half-precision ones (1/64) are told by where no byte is random.
std::vector<uint8_t> random_blocks(WeightKind kind, int64_t count) {
  const size_t bytes = kernels::gguf_block_bytes(kind);
  std::vector<uint8_t> blocks(static_cast<size_t>(count) * bytes);
  std::mt19937 generator(11);
  for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(generator());
  for (size_t block = 0; block < blocks.size(); block += bytes) {
    uint8_t* halves = blocks.data() + block + (kind == WeightKind::kQ6_K ? 208 : 0);
    for (int i = 0; i < (kind == WeightKind::kQ6_K ? 1 : 2); ++i) halves[2 * i] = 0, halves[2 * i + 1] = 0x24;
  }
  return blocks;
}

kernels::PackedLinear pack(WeightKind kind, int64_t out, int64_t in, const Floats& bias,
                           kernels::Activations activations) {
  if (kernels::gguf_block_weights(kind) == 256) {
    const std::vector<uint8_t> blocks = random_blocks(kind, out * in / 256);
    return kernels::PackedLinear::from_gguf(blocks.data(), out, in, kind, bias.data(), activations);
  }
  const Floats weight = random_floats(out * in, 1);
  if (kind == WeightKind::kFloat32 || kind == WeightKind::kBfloat16) {
    return kernels::PackedLinear::from_float(weight.data(), in, out, in, kind, bias.data());
  }
  const int64_t groups = out * in / kernels::kGroup;
  std::vector<uint8_t> blocks(static_cast<size_t>(groups) * kernels::gguf_block_bytes(kind));
  kernels::quantize_gguf(weight.data(), groups, kind, blocks.data());
  return kernels::PackedLinear::from_gguf(blocks.data(), out, in, kind, bias.data(), activations);
}

Floats run(const kernels::PackedLinear& linear, const Floats& x, int64_t rows) {
  Floats out(static_cast<size_t>(rows * linear.out_features()));
  const int64_t in = linear.in_features();
  linear.run(kernels::Pool::instance(), {x.data(), rows, in, in}, {out.data(), linear.out_features()}, nullptr, 0,
             kernels::Activation::kSilu);
  return out;
}

void rows_agree(const kernels::PackedLinear& linear, int64_t in) {
  const int64_t out = linear.out_features();
  constexpr int64_t kRows = 101;
  const Floats x = random_floats(kRows * in, 3);
  const Floats all = run(linear, x, kRows);
  for (int64_t row : {int64_t{0}, int64_t{1}, kRows - 1}) {
    const Floats one = run(linear, Floats(x.begin() + row * in, x.begin() + (row + 1) * in), 1);
    check(std::memcmp(one.data(), all.data() + row * out, one.size() * sizeof(float)) == 0,
          "a row depends on its batch");
  }
  Floats gated(static_cast<size_t>(kRows * (out / 2)));
  if (out % 2 == 0) {
    linear.run_gated(kernels::Pool::instance(), {x.data(), kRows, in, in}, {gated.data(), out / 2},
                     kernels::Activation::kGelu);
  }
  Floats row(static_cast<size_t>(in));
  linear.unpack_row(out - 1, row.data());
}

void linear_rows_agree(WeightKind kind, int64_t out, int64_t in,
                       kernels::Activations activations = kernels::Activations::kFloat) {
  const kernels::PackedLinear part = pack(kind, out, in, random_floats(out, 2), activations);
  rows_agree(part, in);
  rows_agree(kernels::PackedLinear::concat({&part, &part}), in);
}

// A cache whose memory is sized exactly.
struct TestCache {
  kernels::KvCache cache;
  std::vector<uint8_t> keys;
  std::vector<uint8_t> values;

  TestCache(kernels::KvType type, int64_t blocks, int64_t kv_heads, int64_t block_size, int64_t head_dim,
            int64_t value_dim)
      : cache{.keys = nullptr,
              .values = nullptr,
              .type = type,
              .num_blocks = blocks,
              .num_kv_heads = kv_heads,
              .block_size = block_size,
              .head_dim = head_dim,
              .value_dim = value_dim,
              .key_block_stride = 0,
              .value_block_stride = 0} {
    cache.key_block_stride = kv_heads * cache.key_head_elements();
    cache.value_block_stride = kv_heads * cache.value_head_elements();
    keys.resize(static_cast<size_t>(blocks * cache.key_block_stride * cache.element_bytes()));
    values.resize(static_cast<size_t>(blocks * cache.value_block_stride * cache.element_bytes()));
    cache.keys = keys.data();
    cache.values = values.data();
  }
};

// A chunk at the end of a context that ends inside its last block.
void attention_rows_agree(int64_t head_dim, int64_t value_dim, int64_t context, int64_t window,
                          kernels::KvType type = kernels::KvType::kFloat32, int64_t block_size = 16) {
  constexpr int64_t kHeads = 6, kKvHeads = 2, kChunk = 9;
  kernels::Pool& pool = kernels::Pool::instance();
  const int64_t blocks = (context + block_size - 1) / block_size;
  const TestCache memory(type, blocks, kKvHeads, block_size, head_dim, value_dim);
  const kernels::KvCache& cache = memory.cache;
  std::vector<int64_t> slots(static_cast<size_t>(context));
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  for (int64_t i = 0; i < context; ++i)
    slots[static_cast<size_t>(i)] = (blocks - 1 - i / block_size) * block_size + i % block_size;
  for (int64_t i = 0; i < blocks; ++i) table[static_cast<size_t>(i)] = static_cast<int32_t>(blocks - 1 - i);
  const Floats key = random_floats(context * kKvHeads * head_dim, 4);
  const Floats value = random_floats(context * kKvHeads * value_dim, 5);
  kernels::write_kv(pool, context, {key.data(), kKvHeads * head_dim}, {value.data(), kKvHeads * value_dim}, cache,
                    slots.data());

  const int64_t chunk = std::min(kChunk, context);
  const Floats query = random_floats(chunk * kHeads * head_dim, 6);
  const auto attend = [&](int64_t first, int64_t count) {
    const int32_t length = static_cast<int32_t>(context - chunk + first + count);
    const int32_t starts[] = {0, static_cast<int32_t>(count)};
    Floats out(static_cast<size_t>(count * kHeads * value_dim));
    const kernels::AttentionBatch batch{{query.data() + first * kHeads * head_dim, kHeads * head_dim},
                                        kHeads,
                                        1,
                                        table.data(),
                                        blocks,
                                        nullptr,
                                        &length,
                                        starts,
                                        0.125f,
                                        window,
                                        0.0f,
                                        nullptr};
    kernels::paged_attention(pool, batch, cache, {out.data(), kHeads * value_dim});
    return out;
  };
  const Floats whole = attend(0, chunk);
  for (int64_t i = 0; i < chunk; ++i) {
    const Floats one = attend(i, 1);
    check(std::memcmp(one.data(), whole.data() + i * kHeads * value_dim, one.size() * sizeof(float)) == 0,
          "a query depends on its chunk");
  }
}

// Decodes behind one prompt: in company, where its blocks are read once, and alone.
void samples_agree(kernels::KvType type, int64_t samples) {
  constexpr int64_t kHeads = 6, kKvHeads = 2, kDim = 32, kBlock = 32, kShared = 2 * kernels::kAttentionSplit / kBlock;
  kernels::Pool& pool = kernels::Pool::instance();
  const TestCache memory(type, kShared + samples, kKvHeads, kBlock, kDim, kDim);
  const kernels::KvCache& cache = memory.cache;
  const int64_t tokens = cache.num_blocks * kBlock;
  std::vector<int64_t> slots(static_cast<size_t>(tokens));
  for (int64_t i = 0; i < tokens; ++i) slots[static_cast<size_t>(i)] = i;
  const Floats key = random_floats(tokens * kKvHeads * kDim, 7);
  const Floats value = random_floats(tokens * kKvHeads * kDim, 8);
  kernels::write_kv(pool, tokens, {key.data(), kKvHeads * kDim}, {value.data(), kKvHeads * kDim}, cache, slots.data());

  std::vector<int32_t> tables;
  std::vector<int32_t> lengths;
  std::vector<int32_t> starts{0};
  for (int64_t i = 0; i < samples; ++i) {
    for (int64_t block = 0; block < kShared; ++block) tables.push_back(static_cast<int32_t>(block));
    tables.push_back(static_cast<int32_t>(kShared + i));
    lengths.push_back(static_cast<int32_t>(kShared * kBlock + i % kBlock));  // the first ends with the prompt
    starts.push_back(static_cast<int32_t>(i + 1));
  }
  const Floats query = random_floats(samples * kHeads * kDim, 9);
  const auto attend = [&](int64_t first, int64_t count) {
    Floats out(static_cast<size_t>(count * kHeads * kDim));
    const kernels::AttentionBatch batch{{query.data() + first * kHeads * kDim, kHeads * kDim},
                                        kHeads,
                                        count,
                                        tables.data() + first * (kShared + 1),
                                        kShared + 1,
                                        nullptr,
                                        lengths.data() + first,
                                        starts.data(),
                                        0.125f,
                                        0,
                                        0.0f,
                                        nullptr};
    kernels::paged_attention(pool, batch, cache, {out.data(), kHeads * kDim});
    return out;
  };
  const Floats together = attend(0, samples);
  for (int64_t i = 0; i < samples; ++i) {
    const Floats one = attend(i, 1);
    check(std::memcmp(one.data(), together.data() + i * kHeads * kDim, one.size() * sizeof(float)) == 0,
          "a sample depends on the others");
  }
}

// A small model over a prompt at once, and token by token: the same logits after its last token.
void decoder_tokens_agree() {
  constexpr int64_t kHidden = 36, kHeads = 3, kKvHeads = 1, kDim = 8, kInner = 51, kVocab = 45, kBlock = 16,
                    kTokens = 41;
  constexpr int64_t kBlocks = (kTokens + kBlock - 1) / kBlock;
  const auto linear = [](int64_t out, int64_t in) {
    return pack(WeightKind::kFloat32, out, in, random_floats(out, 13), kernels::Activations::kFloat);
  };
  const kernels::PackedLinear embedding = linear(kVocab, kHidden),
                              qkv = linear((kHeads + 2 * kKvHeads) * kDim, kHidden),
                              output = linear(kHidden, kHeads * kDim), gate_up = linear(2 * kInner, kHidden),
                              down = linear(kHidden, kInner);
  const Floats norm = random_floats(kHidden, 14);
  const Floats rotation = random_floats(kTokens * kDim / 2, 15);
  std::vector<int64_t> counting(kTokens);  // token ids, positions and slots
  for (int64_t i = 0; i < kTokens; ++i) counting[static_cast<size_t>(i)] = i;
  std::vector<int32_t> table(kBlocks);
  for (int32_t i = 0; i < kBlocks; ++i) table[static_cast<size_t>(i)] = i;

  const auto logits = [&](int64_t tokens_at_once) {
    kernels::Decoder decoder{&embedding, {}, norm.data(), &embedding};
    std::vector<Floats> memory;
    for (const int64_t window : {0, 9}) {
      kernels::KvCache cache{.keys = memory.emplace_back(kBlocks * kBlock * kDim).data(),
                             .values = memory.emplace_back(kBlocks * kBlock * kDim).data(),
                             .type = kernels::KvType::kFloat32,
                             .num_blocks = kBlocks,
                             .num_kv_heads = kKvHeads,
                             .block_size = kBlock,
                             .head_dim = kDim,
                             .value_dim = kDim,
                             .key_block_stride = kBlock * kDim,
                             .value_block_stride = kBlock * kDim};
      decoder.layers.push_back(
          {norm.data(), &qkv, {nullptr, nullptr, 1e-5f}, &output, norm.data(), &gate_up, &down, window, cache});
    }
    Floats out(kVocab);
    for (int64_t first = 0; first < kTokens; first += tokens_at_once) {
      const int32_t context = static_cast<int32_t>(first + tokens_at_once);
      const int32_t starts[] = {0, static_cast<int32_t>(tokens_at_once)};
      const kernels::DecoderStep step{
          .tokens = tokens_at_once,
          .hidden = kHidden,
          .eps = 1e-5f,
          .rotation = {rotation.data(), kDim / 2, rotation.data(), kDim / 2, kDim / 2, counting.data() + first},
          .slots = counting.data() + first,
          .attention = {{}, kHeads, 1, table.data(), kBlocks, nullptr, &context, starts, 0.3f, 0, 0.0f, nullptr}};
      const int64_t last = tokens_at_once - 1;
      kernels::decoder_logits(kernels::Pool::instance(), decoder, step, counting.data() + first, 1, &last,
                              {out.data(), kVocab});
    }
    return out;
  };
  check(logits(kTokens) == logits(1), "a token's logits depend on its chunk");
}

void elementwise(int64_t dim) {
  const kernels::Kernels& k = kernels::active();
  const Floats x = random_floats(dim, 7);
  const Floats weight = random_floats(dim, 8);
  Floats out(static_cast<size_t>(dim));
  k.rms_norm(x.data(), weight.data(), 1e-5f, out.data(), dim);
  k.layer_norm(x.data(), weight.data(), x.data(), 1e-5f, out.data(), dim);
  check(k.argmax(x.data(), dim) >= 0, "argmax of finite logits");
  const int64_t half = dim / 2;
  k.rotary({out.data(), 1, dim, nullptr, 0, x.data(), weight.data(), half});
}

void draws_agree(int64_t vocab) {
  const Floats logits = random_floats(vocab, 12);
  Floats masked(static_cast<size_t>(vocab), -HUGE_VALF);
  masked.back() = 1;
  for (const kernels::Draw& cut :
       {kernels::Draw{.temperature = 1, .top_k = 0, .top_p = 1, .min_p = 0, .uniform = 0},
        kernels::Draw{.temperature = 0.5f, .top_k = 3, .top_p = 1, .min_p = 0, .uniform = 0},
        kernels::Draw{.temperature = 9, .top_k = 0, .top_p = 0.8f, .min_p = 0, .uniform = 0},
        kernels::Draw{.temperature = 1, .top_k = 0, .top_p = 1, .min_p = 0.1f, .uniform = 0}}) {
    for (const float uniform : {0.0f, 0.3f, 0.9f, 1 - 0x1p-24f}) {
      kernels::Draw draw = cut;
      draw.uniform = uniform;
      const int32_t token = kernels::draw_token(logits.data(), vocab, draw);
      check(token >= 0 && token < vocab, "a token of the vocabulary is drawn");
      check(kernels::draw_token(masked.data(), vocab, draw) == vocab - 1, "a masked token is drawn");
      check(kernels::draw_token(logits.data(), vocab, draw) == token, "a draw depends on the one before");
    }
  }
}

void pool_from_several_threads() {
  const kernels::PackedLinear linear =
      pack(WeightKind::kFloat32, 70, 64, random_floats(70, 9), kernels::Activations::kFloat);
  const Floats x = random_floats(30 * 64, 10);
  const Floats want = run(linear, x, 30);
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round)
        check(run(linear, x, 30) == want, "concurrent callers disturb each other");
    });
  }
  for (int threads : {1, 4, 2, 3, 1, 4}) {
    kernels::Pool::instance().set_threads(threads);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main() {
  kernels::Pool::instance().set_threads(3);
  for (const char* name : kernels::kInstructionSets) {
    if (!kernels::select(name)) continue;
    for (WeightKind kind :
         {WeightKind::kFloat32, WeightKind::kBfloat16, WeightKind::kQ8_0, WeightKind::kQ4_0, WeightKind::kQ4_1}) {
      linear_rows_agree(kind, 66, 320);
      linear_rows_agree(kind, 33, 32);
    }
    for (WeightKind kind : {WeightKind::kQ8_0, WeightKind::kQ4_0, WeightKind::kQ4_1, WeightKind::kQ5_0,
                            WeightKind::kQ5_1, WeightKind::kQ4_K, WeightKind::kQ5_K, WeightKind::kQ6_K}) {
      for (auto activations : {kernels::Activations::kFloat, kernels::Activations::kInt8})
        linear_rows_agree(kind, 33, 512, activations);
    }
    linear_rows_agree(WeightKind::kFloat32, 1, 1);
    linear_rows_agree(WeightKind::kBfloat16, 37, 45);
    attention_rows_agree(16, 16, 40, 0);
    attention_rows_agree(20, 7, 600, 0);
    attention_rows_agree(64, 80, 5, 3);
    attention_rows_agree(64, 64, 530, 0, kernels::KvType::kBfloat16, 32);
    attention_rows_agree(33, 33, 530, 100);
    for (const kernels::KvType type : {kernels::KvType::kBfloat16, kernels::KvType::kFp8}) {
      attention_rows_agree(80, 80, 40, 0, type);
      attention_rows_agree(20, 7, 600, 0, type);
      attention_rows_agree(33, 33, 530, 100, type);
    }
    for (const kernels::KvType type : {kernels::KvType::kFloat32, kernels::KvType::kBfloat16, kernels::KvType::kFp8}) {
      samples_agree(type, 3);
      samples_agree(type, 20);  // more than a tile has rows for
    }
    decoder_tokens_agree();
    for (int64_t dim : {1, 2, 15, 16, 17, 100, 256, 599}) elementwise(dim);
    for (int64_t vocab : {1, 15, 64, 65, 1000}) draws_agree(vocab);
    pool_from_several_threads();
    std::printf("%s: clean\n", name);
  }
  return 0;
}
