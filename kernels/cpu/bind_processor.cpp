// Processor, threads, and the measurements that benchmarks hold kernels against.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels/cpu/arrays.hpp"
#include "kernels/cpu/bindings.hpp"
#include "kernels/cpu/pool.hpp"

namespace nb = nanobind;

namespace twinplane::kernels {
namespace {

constexpr int kRepeats = 5;

double best_seconds(const std::function<void()>& work) {
  double best = 1e30;
  for (int i = 0; i < kRepeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

std::vector<std::string> supported_sets() {
  std::vector<std::string> names;
  for (const char* name : kInstructionSets) {
    if (supported(name)) names.emplace_back(name);
  }
  return names;
}

void set_isa(const std::string& name) {
  if (select(name.c_str())) return;
  std::string have;
  for (const std::string& each : supported_sets()) have += (have.empty() ? "" : ", ") + each;
  throw nb::value_error(("name: this processor has no \"" + name + "\" kernels; it has " + have).c_str());
}

void set_threads(int threads) {
  if (threads < 1 || threads > Pool::kMaxThreads) {
    throw nb::value_error(
        ("n must be from 1 to " + std::to_string(Pool::kMaxThreads) + ", got " + std::to_string(threads)).c_str());
  }
  Pool::instance().set_threads(threads);
}

// As weights are read: from memory allocated as theirs, by all threads, in tiles of several sizes; the best counts.
double measure_read_bandwidth(int64_t megabytes) {
  if (megabytes < 1) throw nb::value_error("megabytes must be at least 1");
  const int64_t floats = megabytes * (1 << 20) / 4;
  Scratch memory;
  float* data = static_cast<float*>(memory.reserve(static_cast<size_t>(floats) * sizeof(float)));
  std::fill_n(data, floats, 1.0f);
  Pool& pool = Pool::instance();
  double best = 0;
  for (const int64_t wanted : {16 * 1024, 64 * 1024, 1024 * 1024}) {
    const int64_t tile = std::min(wanted, floats);
    const int64_t tiles = floats / tile;
    std::vector<float> sums(static_cast<size_t>(tiles));
    for (const auto sum : {active().sum, active().sum_plain}) {
      const double seconds = best_seconds([&] {
        pool.run(tiles, 0, [&](int64_t i, void*) { sums[static_cast<size_t>(i)] = sum(data + i * tile, tile); });
      });
      best = std::max(best, static_cast<double>(tiles * tile * 4) / seconds / 1e9);
    }
  }
  return best;
}

bool populate(nb::handle object) {
  const Array array(object, "array");
  array.contiguous().writable();
  constexpr uintptr_t kPage = 4096;
  const uintptr_t data = reinterpret_cast<uintptr_t>(array.data<char>());
  const uintptr_t begin = data / kPage * kPage;
  const uintptr_t end = data + static_cast<uintptr_t>(array.elements() * array.item_bytes());
  const nb::gil_scoped_release unlocked;
#if defined(__linux__)
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14
  // In pieces: the address space is locked for as long as a call takes, and others have pages to fault in, too.
  constexpr uintptr_t kPiece = uintptr_t{4} << 20;
  for (uintptr_t at = begin; at < end; at += kPiece) {
    if (madvise(reinterpret_cast<void*>(at), std::min(kPiece, end - at), kPopulateWrite) != 0) return false;
  }
  return true;
#else
  return begin == end;
#endif
}

double measure_fma_rate() {
  constexpr int64_t kRounds = 1'000'000;
  Pool& pool = Pool::instance();
  const int64_t tiles = pool.threads() * 8;
  std::vector<float> sinks(static_cast<size_t>(tiles) * 16, 0.5f);
  std::vector<int64_t> flop(static_cast<size_t>(tiles));
  const double seconds = best_seconds([&] {
    pool.run(tiles, 0, [&](int64_t i, void*) {
      flop[static_cast<size_t>(i)] = active().fma_chain(kRounds, sinks.data() + i * 16);
    });
  });
  double total = 0;
  for (const int64_t each : flop) total += static_cast<double>(each);
  return total / seconds / 1e9;
}

std::vector<int64_t> claimed_tiles(int64_t tiles, const std::vector<int64_t>& delays_us) {
  Pool& pool = Pool::instance();
  if (static_cast<int>(delays_us.size()) != pool.threads()) {
    throw nb::value_error(
        ("delays_us must name a delay for each of the " + std::to_string(pool.threads()) + " threads").c_str());
  }
  std::vector<int64_t> claimed(delays_us.size(), 0);
  const nb::gil_scoped_release unlocked;
  pool.run_indexed(tiles, 0, [&](int64_t, void*, int worker) {
    ++claimed[static_cast<size_t>(worker)];
    const int64_t delay = delays_us[static_cast<size_t>(worker)];
    if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
  });
  return claimed;
}

}  // namespace

void bind_processor(nb::module_& m) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  m.def("isa", [] { return active().name; });
  m.def("supported_isas", supported_sets);
  m.def("set_isa", set_isa, nb::arg("name"));
  m.def("cpus_granted", cpus_granted);
  m.def("threads", [] { return Pool::instance().threads(); });
  m.def("set_threads", set_threads, nb::arg("n"), unlocked);
  m.def("populate", populate, nb::arg("array"));
  m.def("measure_read_bandwidth", measure_read_bandwidth, nb::arg("megabytes") = 256, unlocked);
  m.def("measure_fma_rate", measure_fma_rate, unlocked);
  m.def("claimed_tiles", claimed_tiles, nb::arg("tiles"), nb::arg("delays_us"));
}

}  // namespace twinplane::kernels
