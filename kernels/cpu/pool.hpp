// The one thread pool of the CPU kernels.
//
// Work is cut into many small tiles which the threads claim one by one: a thread that the operating system slows down
// takes fewer tiles instead of holding the others up. Workers spin for a moment after a job, because the next one of
// the same step follows within microseconds, and sleep on a futex between steps.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace twinplane::kernels {

inline constexpr size_t kCacheLine = 64;

inline constexpr size_t kHugePage = size_t{2} << 20;

// Asks for huge pages for the whole ones among these bytes, before they are first touched. What is read from end to end
// in every step, weights and KV, then needs hardly any address translation. A wish: it may be refused.
void prefer_huge_pages(void* data, size_t bytes);

// A buffer aligned to cache lines that only grows. Contents are lost when it grows.
class Scratch {
 public:
  ~Scratch();
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  // At least `bytes` bytes; throws std::bad_alloc.
  void* reserve(size_t bytes);
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

class Pool {
 public:
  static constexpr int kMaxThreads = 256;

  // The process-wide pool. Never destroyed: its threads sleep until the process ends.
  static Pool& instance();

  explicit Pool(int threads);
  ~Pool();

  int threads() const { return threads_.load(std::memory_order_relaxed); }
  void set_threads(int threads);

  // Calls `tile(index, scratch)` for every index in [0, tiles), in any order and on any thread, and returns when all
  // are done. `scratch` is the calling thread's own, of at least `scratch_bytes`. `tile` must not throw and must not
  // call run() itself. Calls from several threads are served one after another.
  template <class Tile>
  void run(int64_t tiles, size_t scratch_bytes, const Tile& tile) {
    const auto invoke = [](const void* context, int64_t index, int, void* scratch) noexcept {
      (*static_cast<const Tile*>(context))(index, scratch);
    };
    run_job({invoke, &tile, tiles}, scratch_bytes);
  }

  // As run(), but tells the tile which worker (0 = the caller) runs it.
  template <class Tile>
  void run_indexed(int64_t tiles, const Tile& tile) {
    const auto invoke = [](const void* context, int64_t index, int worker, void*) noexcept {
      (*static_cast<const Tile*>(context))(index, worker);
    };
    run_job({invoke, &tile, tiles}, 0);
  }

 private:
  struct Job {
    void (*invoke)(const void* context, int64_t index, int worker, void* scratch) = nullptr;
    const void* context = nullptr;
    int64_t tiles = 0;
  };

  void run_job(const Job& job, size_t scratch_bytes);
  void claim_tiles(int worker);
  void work(int worker);
  uint32_t wait_for_news(uint32_t seen);
  void wait_until_all_left();
  void start(int threads);
  void stop();

  // How workers join a job (all accesses sequentially consistent unless said):
  //   caller: write job_, next_ = 0; open_ = true [J1]; news_++; claim tiles; open_ = false [J2]; wait for joined_ == 0
  //   worker: news_ changed -> joined_++ [J3]; if open_ [J4] claim tiles; joined_--
  // A worker that reads open_ == true at [J4] joined before the caller's [J2] in the single total order, so the caller
  // sees it in joined_ and waits; one that comes later reads false and touches nothing. So the caller never waits for a
  // worker that has not woken up yet, and job_ is never rewritten under a worker that reads it.
  alignas(kCacheLine) std::atomic<uint32_t> news_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stopping_{false};
  alignas(kCacheLine) std::atomic<int64_t> next_{0};
  alignas(kCacheLine) std::atomic<uint32_t> joined_{0};
  alignas(kCacheLine) std::atomic<bool> open_{false};
  Job job_;

  std::mutex mutex_;  // one job at a time; also guards the members below
  std::atomic<int> threads_{1};
  std::vector<std::thread> workers_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
};

// Processors this process may use: its affinity mask, limited by the CPU quota of its control groups (v1 and v2),
// rounded up.
int cpus_granted();

}  // namespace twinplane::kernels
