// What the benchmark programs share: their whole-number arguments, and percentiles.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace twinplane::core {

// Ends the program with a usage line if there are not N of them.
template <size_t N>
std::array<uint32_t, N> arguments(int argc, char** argv, const char* names) {
  std::array<uint32_t, N> values{};
  if (argc != static_cast<int>(N) + 1) {
    std::fprintf(stderr, "usage: %s %s\n", argv[0], names);
    std::exit(2);
  }
  for (size_t i = 0; i < N; ++i) values[i] = static_cast<uint32_t>(std::strtoul(argv[i + 1], nullptr, 10));
  return values;
}

class Timings {
 public:
  explicit Timings(size_t capacity) { ns_.reserve(capacity); }

  void add(uint64_t ns) { ns_.push_back(ns); }
  void clear() { ns_.clear(); }

  void append(const Timings& other) { ns_.insert(ns_.end(), other.ns_.begin(), other.ns_.end()); }

  // Keeps the lesser of each two; of what has none yet, the other's. Before either is sorted.
  void keep_least(const Timings& other) {
    for (size_t i = 0; i < ns_.size(); ++i) ns_[i] = std::min(ns_[i], other.ns_[i]);
    if (ns_.empty()) append(other);
  }

  // Microseconds below which `share` (0..1) of the times lie. Sorts them.
  double us_at(double share) {
    std::ranges::sort(ns_);
    const auto place = static_cast<size_t>(share * static_cast<double>(ns_.size()));
    return static_cast<double>(ns_[std::min(ns_.size() - 1, place)]) / 1e3;
  }

 private:
  std::vector<uint64_t> ns_;
};

}  // namespace twinplane::core
