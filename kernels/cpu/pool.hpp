// The one thread pool of the CPU kernels.
//
// Work is cut into many small tiles. Each thread has a share of them, consecutive ones, which it takes one by one from
// the front; when it has none left it takes others' from the back. So a thread that the operating system slows down
// does fewer tiles instead of holding the others up, and one that is not reads memory in one direction, and knows what
// it will read next. Workers spin for a moment after a job, because the next one of the same step follows within
// microseconds, and sleep on a futex between steps.
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

// What a thread will read next, in up to two places at a time.
struct Upcoming {
  struct Part {
    const void* data = nullptr;
    size_t bytes = 0;
  };
  Part parts[2];
};

class Pool {
 public:
  static constexpr int kMaxThreads = 256;
  static constexpr int64_t kMaxTiles = int64_t{1} << 31;

  // The process-wide pool. Never destroyed: its threads sleep until the process ends.
  static Pool& instance();

  explicit Pool(int threads);
  ~Pool();

  int threads() const { return threads_.load(std::memory_order_relaxed); }
  void set_threads(int threads);

  // The first tile of a worker's share; that of worker `threads()` would be `tiles`. The caller is worker 0 and has the
  // greatest share: it begins first.
  int64_t first_tile(int64_t tiles, int worker) const { return (tiles * worker + threads() - 1) / threads(); }

  // Whether the worker's share goes on behind a tile of it: then it will probably be given the next one.
  bool goes_on(int64_t tiles, int64_t tile, int worker) const { return tile + 1 < first_tile(tiles, worker + 1); }

  // Calls `tile(index, scratch)` for every index in [0, tiles), in any order and on any thread, and returns when all
  // are done. `scratch` is the calling thread's own, of at least `scratch_bytes`. `tile` must not throw and must not
  // call run() itself. Calls from several threads are served one after another. tiles <= kMaxTiles.
  template <class Tile>
  void run(int64_t tiles, size_t scratch_bytes, const Tile& tile) {
    const auto invoke = [](const void* context, int64_t index, int, void* scratch) noexcept {
      (*static_cast<const Tile*>(context))(index, scratch);
    };
    run_job({invoke, &tile, tiles, nullptr, nullptr}, scratch_bytes);
  }

  // As run(), but calls `tile(index, scratch, worker)`. A worker that has nothing more to do meanwhile fetches what
  // `upcoming(worker)` says into its cache, until there is another job: memory that would be idle.
  template <class Tile>
  void run_indexed(int64_t tiles, size_t scratch_bytes, const Tile& tile) {
    run_indexed(tiles, scratch_bytes, tile, [](int) { return Upcoming{}; });
  }
  template <class Tile, class GetUpcoming>
  void run_indexed(int64_t tiles, size_t scratch_bytes, const Tile& tile, const GetUpcoming& upcoming) {
    const auto invoke = [](const void* context, int64_t index, int worker, void* scratch) noexcept {
      (*static_cast<const Tile*>(context))(index, scratch, worker);
    };
    const auto get_upcoming = [](const void* context, int worker) noexcept {
      return (*static_cast<const GetUpcoming*>(context))(worker);
    };
    run_job({invoke, &tile, tiles, get_upcoming, &upcoming}, scratch_bytes);
  }

 private:
  struct Job {
    void (*invoke)(const void* context, int64_t index, int worker, void* scratch) = nullptr;
    const void* context = nullptr;
    int64_t tiles = 0;
    Upcoming (*upcoming)(const void* context, int worker) = nullptr;  // or null
    const void* upcoming_context = nullptr;
  };

  // Tiles [first, end) that nobody has taken yet, in one word, as both ends move.
  struct alignas(kCacheLine) Share {
    std::atomic<uint64_t> range{0};

    void set(int64_t first, int64_t end) { range.store(pack(first, end), std::memory_order_relaxed); }
    // -1: there are none left.
    int64_t take_first() {
      return take([](int64_t first, int64_t end) { return Taken{first, first + 1, end}; });
    }
    int64_t take_last() {
      return take([](int64_t first, int64_t end) { return Taken{end - 1, first, end - 1}; });
    }

   private:
    struct Taken {
      int64_t tile, first, end;
    };
    static uint64_t pack(int64_t first, int64_t end) {
      return static_cast<uint64_t>(end) << 32 | static_cast<uint64_t>(first);
    }
    template <class Take>
    int64_t take(const Take& from) {
      uint64_t seen = range.load(std::memory_order_relaxed);
      for (;;) {
        const int64_t first = static_cast<int64_t>(seen & UINT32_MAX);
        const int64_t end = static_cast<int64_t>(seen >> 32);
        if (first >= end) return -1;
        const Taken taken = from(first, end);
        if (range.compare_exchange_weak(seen, pack(taken.first, taken.end), std::memory_order_relaxed))
          return taken.tile;
      }
    }
  };

  void run_job(const Job& job, size_t scratch_bytes);
  void claim_tiles(int worker);
  void invoke(int64_t tile, int worker);
  void work(int worker);
  void fetch(const Upcoming& upcoming, uint32_t seen) const;
  uint32_t wait_for_news(uint32_t seen);
  void wait_until_all_left();
  void start(int threads);
  void stop();

  // How workers join a job (all accesses sequentially consistent unless said):
  //   caller: write job_, shares_; open_ = true [J1]; news_++; claim tiles; open_ = false [J2]; wait for joined_ == 0
  //   worker: news_ changed -> joined_++ [J3]; if open_ [J4] claim tiles; joined_--
  // A worker that reads open_ == true at [J4] joined before the caller's [J2] in the single total order, so the caller
  // sees it in joined_ and waits; one that comes later reads false and touches nothing. So the caller never waits for a
  // worker that has not woken up yet, and job_ and shares_ are never rewritten under a worker that reads them. What a
  // worker fetches after it left, it knows by value; addresses that are not valid any more do no harm.
  alignas(kCacheLine) std::atomic<uint32_t> news_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stopping_{false};
  alignas(kCacheLine) std::atomic<uint32_t> joined_{0};
  alignas(kCacheLine) std::atomic<bool> open_{false};
  Job job_;
  std::vector<Share> shares_;

  std::mutex mutex_;  // one job at a time; also guards the members below
  std::atomic<int> threads_{1};
  std::vector<std::thread> workers_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
};

// Processors this process may use: its affinity mask, limited by the CPU quota of its control groups (v1 and v2),
// rounded up.
int cpus_granted();

}  // namespace twinplane::kernels
