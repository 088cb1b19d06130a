// Random traces through every system, under a sanitizer and with asserts on: the scheduler's invariants hold after
// every step, every request ends, every token comes. Usage: simulate_random SEED ROUNDS
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "control_plane/simulator/csrc/clock.hpp"
#include "control_plane/simulator/csrc/contiguous_system.hpp"
#include "control_plane/simulator/csrc/prefill_first_system.hpp"
#include "control_plane/simulator/csrc/static_system.hpp"
#include "control_plane/simulator/csrc/twinplane_system.hpp"

namespace twinplane::simulator {
namespace {

constexpr uint32_t kLongest = 80;  // prompt, or output
constexpr uint32_t kBlockSize = 8;
constexpr uint32_t kMostSamples = 3;

class Round {
 public:
  explicit Round(uint64_t seed) : dice_(seed), trace_(random_trace(1)), samples_(random_trace(kMostSamples)) {}

  void run() {
    core::Config config;
    config.max_rows = roll(kMostSamples, 12);
    config.max_step_tokens = {config.max_rows + roll(0, 60)};
    config.max_chunk_tokens = {roll(1, 40)};
    config.depth = roll(1, 3);
    config.max_substeps = 1u << roll(0, 2);
    config.max_waiting_requests = 700;
    if (roll(0, 1) == 0) config.policy = core::Policy::kFair;
    config.max_model_len = {2 * kLongest};
    core::Pool pool;
    pool.num_blocks = {roll((2 + kMostSamples) * kLongest / kBlockSize, 100)};
    pool.block_size = {kBlockSize};
    check(samples_, [&](Recorder& r) { return std::make_unique<TwinplaneSystem>(samples_, config, pool, 1, r); });
    for (const Reservation reservation : {Reservation::kMax, Reservation::kPow2, Reservation::kOracle}) {
      const ContiguousOptions options{reservation, roll(256, 2000), 2 * kLongest, roll(1, 20)};
      check(trace_, [&](Recorder& r) { return std::make_unique<ContiguousSystem>(trace_, options, r); });
    }
    const StaticOptions fixed{roll(2 * kLongest, 2000), 2 * kLongest, roll(1, 20)};
    check(trace_, [&](Recorder& r) { return std::make_unique<StaticSystem>(trace_, fixed, r); });
    const PrefillFirstOptions prompts_first{pool, 2 * kLongest, roll(1, 20), 2 * kLongest};
    check(trace_, [&](Recorder& r) { return std::make_unique<PrefillFirstSystem>(trace_, prompts_first, r); });
  }

 private:
  uint32_t roll(uint32_t from, uint32_t to) { return std::uniform_int_distribution<uint32_t>(from, to)(dice_); }

  // Some prompts begin with the same stream, some with what an earlier request answered.
  Trace random_trace(uint32_t most_samples) {
    std::vector<Request> requests;
    std::vector<uint64_t> offsets{0};
    std::vector<Run> runs;
    Nanos now;
    for (uint32_t i = 0; i < 200; ++i) {
      now += Nanos{roll(0, 30)};
      const uint32_t prompt = roll(1, kLongest);
      const uint32_t shared = roll(0, prompt);
      const uint64_t stream = i != 0 && roll(0, 3) == 0 ? ~uint64_t{roll(0, i - 1)} : roll(0, 2);
      runs.push_back({stream, 0, shared});
      runs.push_back({1000 + i, 0, prompt - shared});
      offsets.push_back(runs.size());
      requests.push_back(
          {now, prompt, roll(1, kLongest), static_cast<int32_t>(roll(0, 1)), roll(0, 2), roll(1, most_samples)});
    }
    return {std::move(requests), {"a", "b", "c"}, std::move(offsets), std::move(runs)};
  }

  template <typename Make>
  void check(const Trace& trace, Make make) {
    Recorder recorder(trace, Nanos{50}, Nanos{0});
    const auto system = make(recorder);
    const Device device{.by_tokens_ns = Curve({{0, 5}, {10, 8}}, "by_tokens")};
    const ClockOptions options{Curve({{0, static_cast<double>(roll(0, 4))}}, "host"), Nanos{0}};
    twinplane::simulator::run(trace, *system, device, options, recorder, {});
    size_t gaps = 0;
    for (size_t i = 0; i < trace.size(); ++i) {
      const RequestRecord& record = recorder.requests()[i];
      require(record.outcome == Outcome::kFinished, "a request did not finish", i);
      require(record.tokens == trace[i].samples * trace[i].output_tokens, "a request has another number of tokens", i);
      require(record.first_scheduled >= trace[i].arrival && record.first_token >= record.first_scheduled &&
                  record.finish >= record.first_token,
              "a request went backwards in time", i);
      gaps += record.tokens - trace[i].samples;
    }
    require(recorder.gaps_s().size() == gaps, "gaps are missing", gaps);
    for (const MemorySample& sample : recorder.samples()) {
      const Memory& m = sample.memory;
      require(m.held + m.reserved <= m.allocated && m.allocated <= m.capacity, "memory does not add up",
              sample.at.value);
    }
  }

  static void require(bool holds, const char* what, uint64_t where) {
    if (holds) return;
    std::fprintf(stderr, "%s: %lu\n", what, static_cast<unsigned long>(where));
    std::abort();
  }

  std::mt19937_64 dice_;
  Trace trace_;
  Trace samples_;
};

}  // namespace
}  // namespace twinplane::simulator

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const uint64_t rounds = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 20;
  for (uint64_t i = 0; i < rounds; ++i) {
    std::printf("seed %lu\n", static_cast<unsigned long>(seed + i));
    twinplane::simulator::Round(seed + i).run();
  }
}
