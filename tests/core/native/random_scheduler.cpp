// Drives the scheduler with random requests, cancels, late results, deadlines and lost data planes, under a sanitizer
// and with asserts on; checks conservation after every move and every token at the end. Usage: random_scheduler SEED
// ROUNDS
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>

#include "control_plane/core/scheduler.hpp"
#include "tests/core/native/fake_device.hpp"

namespace twinplane::core::testing {
namespace {

constexpr int32_t kEos = 3;

struct Expected {
  std::vector<int32_t> output;
  std::vector<int32_t> seen;
  FinishReason finish = FinishReason::kNone;
};

class Driver {
 public:
  explicit Driver(uint64_t seed)
      : dice_(seed), config_(random_config()), gate_(config_), scheduler_(config_, gate_, events_) {
    attach();
  }

  void run(int moves) {
    for (int i = 0; i < moves; ++i) {
      move();
      const std::string difference = scheduler_.check();
      REQUIRE(difference.empty(), "move %d: %s", i, difference.c_str());
    }
    if (!scheduler_.is_attached()) attach();
    while (!in_flight_.empty() || tick()) {
      if (!in_flight_.empty()) retire();
    }
    poll();
    for (const auto& [id, request] : requests_) {
      REQUIRE(request.finish != FinishReason::kNone, "request %lu never ended", id);
      if (request.finish == FinishReason::kEos || request.finish == FinishReason::kLength) {
        REQUIRE(request.seen == request.output, "request %lu is incomplete", id);
      }
    }
    REQUIRE(scheduler_.session()->blocks.free() == scheduler_.session()->blocks.total(), "blocks are missing");
  }

  const Counters& counters() const { return scheduler_.counters(); }

 private:
  uint32_t roll(uint32_t from, uint32_t to) { return std::uniform_int_distribution<uint32_t>(from, to)(dice_); }

  Config random_config() {
    Config config;
    config.max_rows = roll(has_lulls_ ? 4 : 1, 9);
    config.max_step_tokens = {config.max_rows + roll(0, 40)};
    config.max_chunk_tokens = {roll(1, 30)};
    config.depth = roll(1, 3);
    config.max_substeps = 1u << roll(0, 2);
    config.max_waiting_requests = 20;
    config.max_waiting_tokens = 500;
    config.max_model_len = {110};
    config.policy = static_cast<Policy>(roll(0, 2));
    config.itl_target_us = roll(0, 2) * 1000;
    config.max_overtaken = roll(0, 3);
    return config;
  }

  void attach() {
    const Pool pool{{roll(10, 60)}, {roll(1, 9)}};
    const wire::Capacities capacities = capacities_for(config_, pool);
    scheduler_.attach(pool, capacities);
    device_ = std::make_unique<FakeDevice>(pool, capacities);
    step_.assign(wire::StepSlotLayout(capacities).bytes, std::byte{0});
    in_flight_.clear();
  }

  void move() {
    now_ += Nanos{1};
    // Every other history has short bursts and long lulls, in which nobody waits: then steps have several substeps,
    // until somebody comes.
    if (has_lulls_ && roll(0, is_lull_ ? 399 : 19) == 0) is_lull_ = !is_lull_;
    switch (roll(0, 19)) {
      case 0 ... 4:
        if (is_lull_ && (!scheduler_.population().waiting.empty() || roll(0, 5) != 0)) return go_on();
        return submit();
      case 5:
        return void(scheduler_.cancel({roll(0, next_id_)}));
      case 6:
        return poll();
      case 7:
        if (roll(0, 9) != 0) return;
        if (scheduler_.is_attached()) {
          scheduler_.detach(roll(0, 1) == 0 ? SessionEnd::kLost : SessionEnd::kStepFailed);
        } else {
          attach();
        }
        return;
      case 8 ... 13:
        return void(tick());
      default:
        if (scheduler_.is_attached() && !in_flight_.empty()) retire();
    }
  }

  void go_on() {
    if (scheduler_.is_attached() && !tick() && !in_flight_.empty()) retire();
  }

  void submit() {
    std::vector<int32_t> prompt(roll(1, 50));
    for (int32_t& token : prompt) token = static_cast<int32_t>(roll(0, kVocab - 1));
    RequestParams params;
    params.max_tokens = {roll(1, has_lulls_ ? 60 : 30)};
    params.eos_token_ids = {kEos};
    params.priority = static_cast<int32_t>(roll(0, 5)) / 5;
    params.tenant = std::string(roll(0, 3), 't');
    params.logprobs = roll(0, 1) == 0;
    params.sampling.repetition_penalty = roll(0, 1) == 0 ? 1.0f : 1.5f;
    // A deadline so near, and a small pool full of cached blocks, keep steps from having several substeps.
    if (roll(0, has_lulls_ ? 99 : 9) == 0) params.deadline = now_ + Nanos{roll(1, 200)};
    params.uses_cache = !has_lulls_ || roll(0, 3) == 0;
    const uint64_t id = next_id_++;
    const uint32_t max_tokens = params.max_tokens.value;
    const auto refusal = gate_.enter({id}, prompt, std::move(params), now_, [this](std::unique_ptr<Sequence> sequence) {
      scheduler_.accept(std::move(sequence));
    });
    if (!refusal) requests_[id].output = expected_output(prompt, max_tokens, kEos);
  }

  bool tick() {
    if (!scheduler_.tick(step_.data(), now_)) return false;
    in_flight_.push_back(step_);
    return true;
  }

  void retire() {
    std::vector<std::byte> result(device_->result_bytes());
    if (device_->run(in_flight_.front().data(), result.data(), scheduler_.interrupted().value)) in_flight_.pop_front();
    scheduler_.retire(result.data(), now_);
  }

  void poll() {
    events_.flush();
    events_.poll([this](const Sequence& s, uint32_t from, uint32_t to, bool is_last) {
      Expected& request = requests_.at(s.id.value);
      const int32_t* const output = s.tokens + s.prompt_tokens.value;
      request.seen.insert(request.seen.end(), output + from, output + to);
      REQUIRE(std::equal(request.seen.begin(), request.seen.end(), request.output.begin()), "request %lu", s.id.value);
      if (!is_last) return;
      request.finish = s.finish;
      gate_.forget(s.id);
    });
  }

  std::mt19937_64 dice_;
  const bool has_lulls_ = roll(0, 1) == 0;
  Config config_;
  Gate gate_;
  Scheduler scheduler_;
  EventQueue events_;
  std::unique_ptr<FakeDevice> device_;
  std::vector<std::byte> step_;
  std::deque<std::vector<std::byte>> in_flight_;
  std::map<uint64_t, Expected> requests_;
  Nanos now_;
  uint32_t next_id_ = 0;
  bool is_lull_ = false;
};

}  // namespace
}  // namespace twinplane::core::testing

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const uint64_t rounds = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 200;
  uint64_t more_results = 0, interrupted = 0;
  for (uint64_t i = 0; i < rounds; ++i) {
    std::printf("seed %lu\n", seed + i);
    twinplane::core::testing::Driver driver(seed + i);
    driver.run(1500);
    more_results += driver.counters().results_taken - driver.counters().steps_retired;
    interrupted += driver.counters().steps_interrupted;
  }
  std::printf("%lu results beyond the first of a step, %lu steps interrupted\n", more_results, interrupted);
  REQUIRE(rounds < 20 || (more_results > 10 * rounds && interrupted > rounds), "hardly any step had several substeps");
}
