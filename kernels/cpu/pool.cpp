#include "kernels/cpu/pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/cpu/kernels.hpp"

namespace twinplane::kernels {
namespace {

// Long enough to bridge the Python between two kernels of a step, short enough to leave the processor to others between
// steps.
constexpr std::chrono::microseconds kSpin{30};
constexpr int kPausesPerClockRead = 32;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Spins until `done` or for kSpin; returns whether it is done.
template <class Condition>
bool spin_until(const Condition& done) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

// Treats denormals (below 1.2e-38) as zero while it lives, as a guard of the current thread. A softmax over a long
// context is full of them, and each costs the processor a hundred cycles. Every tile runs under it, so results do not
// depend on the caller's own mode, which is put back.
class FlushDenormals {
#if defined(__x86_64__)
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kDenormalsAreZero = 0x0040;
  unsigned before_;
#endif
};

}  // namespace

void prefer_huge_pages(void* data, size_t bytes) {
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

Scratch::~Scratch() { std::free(data_); }

void* Scratch::reserve(size_t bytes) {
  if (bytes <= bytes_) return data_;
  std::free(data_);
  bytes_ = 0;
  const size_t alignment = bytes >= kHugePage ? kHugePage : kCacheLine;
  const size_t rounded = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  if (posix_memalign(&data_, alignment, rounded) != 0) {
    data_ = nullptr;
    throw std::bad_alloc();
  }
  prefer_huge_pages(data_, rounded);
  bytes_ = rounded;
  return data_;
}

Pool& Pool::instance() {
  static Pool* pool = new Pool(std::min(cpus_granted(), kMaxThreads));
  return *pool;
}

Pool::Pool(int threads) { start(threads); }

Pool::~Pool() { stop(); }

void Pool::set_threads(int threads) {
  const std::lock_guard lock(mutex_);
  stop();
  start(threads);
}

void Pool::start(int threads) {
  threads_ = threads;
  shares_ = std::vector<Share>(static_cast<size_t>(threads));
  while (static_cast<int>(scratch_.size()) < threads) scratch_.push_back(std::make_unique<Scratch>());
  for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { work(worker); });
}

void Pool::stop() {
  stopping_ = true;
  ++news_;
  news_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  stopping_ = false;
}

void Pool::run_job(const Job& job, size_t scratch_bytes) {
  const std::lock_guard lock(mutex_);
  for (const auto& scratch : scratch_) scratch->reserve(scratch_bytes);  // here, where it may throw
  job_ = job;
  const bool shared = job.tiles > 1 && threads() > 1;
  if (!shared) {
    [[maybe_unused]] const FlushDenormals flush;
    for (int64_t tile = 0; tile < job.tiles; ++tile) invoke(tile, 0);
    if (const auto after_job = active().after_job) after_job();
    return;
  }
  for (int worker = 0; worker < threads(); ++worker) {
    shares_[static_cast<size_t>(worker)].set(first_tile(job.tiles, worker), first_tile(job.tiles, worker + 1));
  }
  open_ = true;  // [J1]
  ++news_;
  if (sleepers_ != 0) news_.notify_all();
  claim_tiles(0);
  open_ = false;  // [J2]
  wait_until_all_left();
}

void Pool::claim_tiles(int worker) {
  [[maybe_unused]] const FlushDenormals flush;
  const auto share_of = [&](int other) -> Share& { return shares_[static_cast<size_t>((worker + other) % threads())]; };
  for (int64_t tile; (tile = share_of(0).take_first()) >= 0;) invoke(tile, worker);
  for (int other = 1; other < threads(); ++other) {
    for (int64_t tile; (tile = share_of(other).take_last()) >= 0;) invoke(tile, worker);
  }
  if (const auto after_job = active().after_job) after_job();
}

void Pool::invoke(int64_t tile, int worker) {
  job_.invoke(job_.context, tile, worker, scratch_[static_cast<size_t>(worker)]->data());
}

void Pool::work(int worker) {
  uint32_t seen = 0;
  for (;;) {
    seen = wait_for_news(seen);
    if (stopping_) return;
    Upcoming upcoming;
    ++joined_;    // [J3]
    if (open_) {  // [J4]
      claim_tiles(worker);
      if (job_.upcoming != nullptr) upcoming = job_.upcoming(job_.upcoming_context, worker);
    }
    if (--joined_ == 0) joined_.notify_one();
    fetch(upcoming, seen);
  }
}

void Pool::fetch(const Upcoming& upcoming, uint32_t seen) const {
  constexpr size_t kPiece = 1024;  // little enough to notice a job soon
  for (size_t at = 0; at < std::max(upcoming.parts[0].bytes, upcoming.parts[1].bytes); at += kPiece) {
    for (const Upcoming::Part& part : upcoming.parts) {
      if (news_.load(std::memory_order_relaxed) != seen) return;
      const char* data = static_cast<const char*>(part.data);
      for (size_t i = at; i < std::min(at + kPiece, part.bytes); i += kCacheLine) __builtin_prefetch(data + i, 0, 2);
    }
  }
}

// A worker that starts late finds the news of earlier jobs and merely looks.
uint32_t Pool::wait_for_news(uint32_t seen) {
  if (!spin_until([&] { return news_.load(std::memory_order_relaxed) != seen; })) {
    ++sleepers_;  // before wait() compares: a caller that bumps news_ after the comparison sees a sleeper and notifies
    news_.wait(seen);
    --sleepers_;
  }
  return news_;
}

void Pool::wait_until_all_left() {
  if (spin_until([&] { return joined_ == 0; })) return;
  for (uint32_t still = joined_; still != 0; still = joined_) joined_.wait(still);
}

}  // namespace twinplane::kernels
