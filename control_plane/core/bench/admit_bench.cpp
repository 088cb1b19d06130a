// Measures the tick that admits a crowd: so many waiting prompts, none of which shares anything with another, become
// resident in one step. Usage: admit_bench REQUESTS TOKENS ROUNDS BLOCK_SIZE; prints one JSON object.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "control_plane/core/bench/timings.hpp"
#include "control_plane/core/scheduler.hpp"
#include "shared/csrc/clock.hpp"

namespace twinplane::core {
namespace {

struct Options {
  uint32_t requests, tokens, rounds, block_size;
};

Config config_of(const Options& o) {
  Config config;
  config.max_rows = o.requests;
  config.max_step_tokens = {std::max(o.requests * o.tokens, o.requests)};
  config.max_chunk_tokens = {o.tokens};
  config.depth = 1;
  config.max_waiting_requests = o.requests;
  config.max_waiting_tokens = 1ull << 40;
  config.max_model_len = {o.tokens + 2};
  return config;
}

// Room for all of them, and for as many again that have just left.
Pool pool_of(const Options& o) {
  const uint32_t blocks = blocks_for({o.tokens + 2}, {o.block_size}).value;
  return {{2 * o.requests * (blocks + 1)}, {o.block_size}, {}};
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        config_(config_of(options)),
        pool_(pool_of(options)),
        capacities_(capacities_for(config_, pool_)),
        gate_(config_),
        scheduler_(config_, gate_, events_),
        step_(wire::StepSlotLayout(capacities_).bytes),
        result_(wire::ResultSlotLayout(capacities_).bytes),
        times_(options.rounds) {
    scheduler_.attach(pool_, capacities_);
  }

  void run() {
    constexpr uint32_t kWarmUp = 3;
    for (uint32_t i = 0; i < kWarmUp + options_.rounds; ++i) {
      const uint64_t ns = admit_all();
      if (i >= kWarmUp) times_.add(ns);
    }
    std::printf(
        "{\"requests\": %u, \"tokens\": %u, \"rounds\": %u, \"p50_us\": %.3f, \"p99_us\": %.3f, \"max_us\": %.3f}\n",
        options_.requests, options_.tokens, options_.rounds, times_.us_at(0.5), times_.us_at(0.99), times_.us_at(1.0));
  }

 private:
  // One round; what the tick took. All leave afterwards.
  uint64_t admit_all() {
    for (uint32_t i = 0; i < options_.requests; ++i) submit();
    const uint64_t start_ns = shm::now_ns();
    if (!scheduler_.tick(step_.data(), {start_ns})) std::fprintf(stderr, "no step\n"), std::abort();
    const uint64_t ns = shm::now_ns() - start_ns;
    if (scheduler_.population().running.size() != options_.requests) std::fprintf(stderr, "not all in\n"), std::abort();
    retire();
    // The rows to close go with the next step.
    if (scheduler_.tick(step_.data(), {shm::now_ns()})) retire();
    events_.flush();
    events_.poll([this](const Sequence& sequence, uint32_t, uint32_t, bool is_last) {
      if (is_last) gate_.forget(sequence.id);
    });
    return ns;
  }

  void submit() {
    RequestParams params;
    params.max_tokens = {1};
    prompt_.resize(options_.tokens);
    for (int32_t& token : prompt_) token = static_cast<int32_t>(dice_() % 50'000);
    const auto refusal =
        gate_.enter({next_id_++}, prompt_, std::move(params), {shm::now_ns()},
                    [this](std::unique_ptr<Sequence> sequence) { scheduler_.accept(std::move(sequence)); });
    if (refusal) std::fprintf(stderr, "%s\n", refusal->message.c_str()), std::abort();
  }

  // Every sampled token ends its request.
  void retire() {
    const wire::StepSlotLayout step(capacities_);
    const wire::ResultSlotLayout layout(capacities_);
    const auto& header = *reinterpret_cast<const wire::StepHeader*>(step_.data() + step.header);
    const auto* seqs = reinterpret_cast<const wire::SeqEntry*>(step_.data() + step.seqs);
    auto* entries = reinterpret_cast<wire::ResultEntry*>(result_.data() + layout.entries);
    wire::ResultHeader result{};
    result.step = header.step;
    result.num_entries = header.num_seqs;
    result.last = 1;
    for (uint32_t i = 0; i < header.num_seqs; ++i)
      entries[i] = {.row = seqs[i].row, .token = 7, .logprob = -1, .rank = 1, .flags = 0};
    *reinterpret_cast<wire::ResultHeader*>(result_.data() + layout.header) = result;
    scheduler_.retire(result_.data(), {shm::now_ns()});
  }

  Options options_;
  Config config_;
  Pool pool_;
  wire::Capacities capacities_;
  Gate gate_;
  Scheduler scheduler_;
  EventQueue events_;
  std::vector<std::byte> step_;
  std::vector<std::byte> result_;
  std::vector<int32_t> prompt_;
  Timings times_;
  std::mt19937 dice_{1};
  uint64_t next_id_ = 0;
};

}  // namespace
}  // namespace twinplane::core

int main(int argc, char** argv) {
  const auto [requests, tokens, rounds, block_size] =
      twinplane::core::arguments<4>(argc, argv, "REQUESTS TOKENS ROUNDS BLOCK_SIZE");
  twinplane::core::Bench({requests, tokens, rounds, block_size}).run();
}
