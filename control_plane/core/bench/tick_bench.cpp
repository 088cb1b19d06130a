// Measures what the scheduler adds to every step: accept newcomers + retire a result + plan and commit the next step +
// hand events over. A steady mixture of decodes, block growth, finishes and admissions; results are made up outside the
// timed part, and so is what other threads do (submitting, polling). Usage: tick_bench RUNNING TICKS PROMPT OUTPUT
// BLOCK_SIZE DEPTH POOL_PERCENT MAX_SUBSTEPS REPEATS; prints one JSON object.
//
// Every repeat does the same, tick by tick. The least of a tick's times is therefore what it takes where nothing else,
// not even an interrupt, comes in between.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <new>
#include <random>
#include <vector>

#include "control_plane/core/bench/timings.hpp"
#include "control_plane/core/scheduler.hpp"
#include "shared/csrc/clock.hpp"

#ifndef PR_SET_SYSCALL_USER_DISPATCH  // Linux 5.11
#define PR_SET_SYSCALL_USER_DISPATCH 59
#define PR_SYS_DISPATCH_ON 1
#define SYSCALL_DISPATCH_FILTER_ALLOW 0
#define SYSCALL_DISPATCH_FILTER_BLOCK 1
#endif

namespace {

// Heap operations inside the timed part.
bool is_counting = false;
uint64_t heap_operations = 0;

// Timed parts that made a system call: the kernel turns the first one of each into a SIGSYS, and the rest pass.
volatile char dispatch = SYSCALL_DISPATCH_FILTER_ALLOW;
volatile uint64_t system_calls = 0;

void on_system_call(int, siginfo_t*, void* context) {
  dispatch = SYSCALL_DISPATCH_FILTER_ALLOW;
  system_calls = system_calls + 1;
#if defined(__x86_64__)
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const long result = syscall(registers[REG_RAX], registers[REG_RDI], registers[REG_RSI], registers[REG_RDX],
                              registers[REG_R10], registers[REG_R8], registers[REG_R9]);
  registers[REG_RAX] = result == -1 ? -errno : result;
#endif
}

bool watch_system_calls() {
#if defined(__x86_64__)
  struct sigaction action{};
  action.sa_sigaction = on_system_call;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSYS, &action, nullptr);
  return prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON, 0, 0, &dispatch) == 0;
#else
  return false;
#endif
}

}  // namespace

void* operator new(size_t bytes) {
  heap_operations += is_counting;
  if (void* at = std::malloc(bytes)) return at;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  heap_operations += is_counting;
  const size_t unit = static_cast<size_t>(alignment);
  if (void* at = std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit)) return at;
  throw std::bad_alloc();
}
void operator delete(void* at) noexcept {
  heap_operations += is_counting;
  std::free(at);
}
void operator delete(void* at, size_t) noexcept { operator delete(at); }
void operator delete(void* at, std::align_val_t) noexcept { operator delete(at); }
void operator delete(void* at, size_t, std::align_val_t) noexcept { operator delete(at); }

namespace twinplane::core {
namespace {

struct Options {
  uint32_t running, ticks, prompt, output, block_size, depth, pool_percent, max_substeps, repeats;
};

Config config_of(const Options& o) {
  Config config;
  config.max_rows = o.running;
  config.max_step_tokens = {o.running + 2048};
  config.depth = o.depth;
  config.max_substeps = o.max_substeps;
  config.max_waiting_requests = o.running;
  config.max_waiting_tokens = 1ull << 40;
  config.max_model_len = {2 * (o.prompt + o.output)};
  return config;
}

// 100 % holds all rows at their mean length, with a tenth to spare.
Pool pool_of(const Options& o) {
  const uint64_t tokens = uint64_t{o.running} * (o.prompt + o.output / 2) * o.pool_percent / 100;
  return {{static_cast<uint32_t>(tokens / o.block_size + tokens / o.block_size / 10 + o.running)}, {o.block_size}, {}};
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
        steps_(options.depth, std::vector<std::byte>(wire::StepSlotLayout(capacities_).bytes)),
        result_(wire::ResultSlotLayout(capacities_).bytes),
        times_(3 * options.output + options.ticks) {
    scheduler_.attach(pool_, capacities_);
    newcomers_.reserve(config_.max_live());
  }

  void run() {
    // Every row has been opened, closed and opened again before the first tick that counts.
    for (uint32_t i = 0; i < 3 * options_.output; ++i) turn();
    times_.clear();
    heap_operations = growths_ = admissions_ = seqs_ = results_ = 0;
    sent_before_ = sent_;
    system_calls = 0;
    before_ = scheduler_.counters();
    has_watch_ = watch_system_calls();
    for (uint32_t i = 0; i < options_.ticks; ++i) turn();
    dispatch = SYSCALL_DISPATCH_FILTER_ALLOW;
  }

  const Timings& times() const { return times_; }

  // `times`: of all repeats. `least`: of each tick. Both are sorted.
  void report(Timings& times, Timings& least) const {
    const double ticks = options_.ticks;
    const Counters& after = scheduler_.counters();
    uint64_t finished = 0;
    for (size_t i = 0; i < after.finished.size(); ++i) finished += after.finished[i] - before_.finished[i];
    std::printf(
        "{\"running\": %u, \"ticks\": %u, \"p50_us\": %.3f, \"p99_us\": %.3f, \"p999_us\": %.3f, \"max_us\": %.3f, "
        "\"undisturbed_p50_us\": %.3f, \"undisturbed_p99_us\": %.3f, "
        "\"allocations_per_tick\": %.6f, \"syscalls_per_tick\": ",
        options_.running, options_.ticks, times.us_at(0.5), times.us_at(0.99), times.us_at(0.999), times.us_at(1.0),
        least.us_at(0.5), least.us_at(0.99), static_cast<double>(heap_operations) / ticks);
    if (has_watch_) {
      std::printf("%.6f", static_cast<double>(system_calls) / ticks);
    } else {
      std::printf("null");
    }
    std::printf(
        ", \"sequences_per_step\": %.2f, \"finishes_per_tick\": %.4f, \"admissions_per_tick\": %.4f, "
        "\"table_writes_per_tick\": %.4f, \"preemptions_per_tick\": %.5f, \"results_per_step\": %.3f}\n",
        static_cast<double>(seqs_) / ticks, static_cast<double>(finished) / ticks,
        static_cast<double>(admissions_) / ticks, static_cast<double>(growths_) / ticks,
        static_cast<double>(after.preemptions - before_.preemptions) / ticks,
        static_cast<double>(results_) / static_cast<double>(sent_ - sent_before_));
  }

 private:
  void turn() {
    submit();
    if (sent_ - retired_ == options_.depth || !last_tick_sent_) answer();
    const bool has_result = sent_ != retired_ && (sent_ - retired_ == options_.depth || !last_tick_sent_);
    std::vector<std::byte>& slot = steps_[sent_ % options_.depth];

    const uint64_t start_ns = shm::now_ns();
    is_counting = true;
    dispatch = has_watch_ ? SYSCALL_DISPATCH_FILTER_BLOCK : SYSCALL_DISPATCH_FILTER_ALLOW;
    for (auto& sequence : newcomers_) scheduler_.accept(std::move(sequence));
    if (has_result) scheduler_.retire(result_.data(), {start_ns});
    const bool has_step = scheduler_.tick(slot.data(), {start_ns});
    events_.flush();
    dispatch = SYSCALL_DISPATCH_FILTER_ALLOW;
    is_counting = false;
    times_.add(shm::now_ns() - start_ns);

    newcomers_.clear();
    results_ += has_result;
    if (has_result) {
      substep_ = is_last_ ? 0 : substep_ + 1;
      retired_ += is_last_;
    }
    sent_ += has_step;
    last_tick_sent_ = has_step;
    if (has_step) count(slot);
    events_.poll([this](const Sequence& sequence, uint32_t, uint32_t, bool is_last) {
      if (is_last) gate_.forget(sequence.id);
    });
  }

  // From 1 to `most`.
  uint32_t roll(uint32_t most) { return 1 + static_cast<uint32_t>(dice_() % most); }

  // Keeps the queue filled, so that whoever finishes is replaced. With substeps, which need that nobody waits, those
  // who have finished are replaced a few at a time.
  bool needs_more() {
    if (options_.max_substeps == 1) return gate_.waiting_requests() < config_.max_waiting_requests / 4 + 1;
    const auto live = static_cast<uint32_t>(scheduler_.population().sequences.size() + newcomers_.size());
    is_topping_up_ = live < options_.running && (is_topping_up_ || live <= options_.running - options_.running / 8 - 1);
    return is_topping_up_;
  }

  void submit() {
    while (needs_more()) {
      const uint32_t length = roll(2 * options_.prompt - 1);
      RequestParams params;
      params.max_tokens = {roll(2 * options_.output - 1)};
      params.eos_token_ids = {kEos, kEos + 1};
      params.logprobs = true;
      params.deadline = {shm::now_ns() + 3600 * shm::kNsPerSecond};
      prompt_.resize(length);
      for (int32_t& token : prompt_) token = static_cast<int32_t>(dice_() % kEos);
      const auto refusal = gate_.enter({next_id_++}, prompt_, std::move(params), {shm::now_ns()},
                                       [this](std::unique_ptr<Sequence> s) { newcomers_.push_back(std::move(s)); });
      if (refusal) std::fprintf(stderr, "%s\n", refusal->message.c_str()), std::abort();
    }
  }

  // The next result of the oldest step in flight. From the second substep on, rows whose sequence has ended are silent.
  void answer() {
    if (sent_ == retired_) return;
    const wire::StepSlotLayout step_layout(capacities_);
    const wire::ResultSlotLayout layout(capacities_);
    const std::byte* const step = steps_[retired_ % options_.depth].data();
    const auto& header = *reinterpret_cast<const wire::StepHeader*>(step + step_layout.header);
    const auto* seqs = reinterpret_cast<const wire::SeqEntry*>(step + step_layout.seqs);
    auto* entries = reinterpret_cast<wire::ResultEntry*>(result_.data() + layout.entries);
    uint32_t count = 0;
    for (uint32_t i = 0; i < header.num_seqs; ++i) {
      if ((seqs[i].flags & wire::kSeqFlagSamples) == 0) continue;
      if (substep_ != 0 && scheduler_.session()->rows.owner({seqs[i].row}) == nullptr) continue;
      entries[count++] = {
          .row = seqs[i].row, .token = static_cast<int32_t>(dice_() % kEos), .logprob = -1, .rank = 1, .flags = 0};
    }
    wire::ResultHeader result{};
    result.step = header.step;
    result.num_entries = count;
    result.substep = substep_;
    result.last = substep_ + 1 == header.num_substeps || scheduler_.interrupted().value > header.step;
    is_last_ = result.last != 0;
    std::memcpy(result_.data() + layout.header, &result, sizeof(result));
  }

  void count(const std::vector<std::byte>& slot) {
    const auto& header = *reinterpret_cast<const wire::StepHeader*>(slot.data());
    admissions_ += header.num_opens;
    growths_ += header.num_table_writes;
    seqs_ += header.num_seqs;
  }

  static constexpr int32_t kEos = 32'000;  // never sampled

  Options options_;
  Config config_;
  Pool pool_;
  wire::Capacities capacities_;
  Gate gate_;
  Scheduler scheduler_;
  EventQueue events_;
  std::vector<std::vector<std::byte>> steps_;
  std::vector<std::byte> result_;
  std::vector<std::unique_ptr<Sequence>> newcomers_;
  std::vector<int32_t> prompt_;
  Timings times_;
  std::mt19937 dice_{1};
  Counters before_;
  uint64_t next_id_ = 0, sent_ = 0, retired_ = 0;
  uint64_t growths_ = 0, admissions_ = 0, seqs_ = 0;
  uint64_t results_ = 0, sent_before_ = 0;
  uint32_t substep_ = 0;  // of the oldest step in flight
  bool is_last_ = true;   // what answer() has written is its step's last
  bool is_topping_up_ = false;
  bool last_tick_sent_ = true;
  bool has_watch_ = false;
};

}  // namespace
}  // namespace twinplane::core

int main(int argc, char** argv) {
  using namespace twinplane::core;
  const auto v =
      arguments<9>(argc, argv, "RUNNING TICKS PROMPT OUTPUT BLOCK_SIZE DEPTH POOL_PERCENT MAX_SUBSTEPS REPEATS");
  const Options options{v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], std::max(v[8], 1u)};
  Timings all(size_t{options.repeats} * options.ticks);
  Timings least(options.ticks);
  for (uint32_t i = 1; i <= options.repeats; ++i) {
    Bench bench(options);
    bench.run();
    all.append(bench.times());
    least.keep_least(bench.times());
    if (i == options.repeats) bench.report(all, least);
  }
}
