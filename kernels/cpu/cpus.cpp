// How many processors this process was granted.
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "kernels/cpu/pool.hpp"

namespace twinplane::kernels {
namespace {

int affinity_count() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));  // more than 1024 processors
}

// Quota / period of one control group directory; infinity if it sets none.
double quota_of(const std::filesystem::path& group) {
  double quota = -1;
  double period = 100000;
  if (std::ifstream v2(group / "cpu.max"); v2) {
    v2 >> quota >> period;  // "max 100000" leaves quota at 0
    if (!v2) quota = -1;
  } else {
    std::ifstream(group / "cpu.cfs_quota_us") >> quota;
    std::ifstream(group / "cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : INFINITY;
}

// The smallest quota on the way from this process's group to the root. Inside a container the path in
// /proc/self/cgroup may not exist below /sys/fs/cgroup; then only the mount's root counts, which is the container's.
double group_quota() {
  double quota = INFINITY;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && controllers.find("cpu") == std::string::npos) continue;
    const std::filesystem::path root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    std::filesystem::path below = std::filesystem::path(line.substr(second + 1)).relative_path();
    for (; !below.empty(); below = below.parent_path()) quota = std::min(quota, quota_of(root / below));
    quota = std::min(quota, quota_of(root));
  }
  return quota;
}

}  // namespace

int cpus_granted() {
  const int processors = affinity_count();
  const double quota = group_quota();
  return quota < processors ? std::max(1, static_cast<int>(std::ceil(quota))) : processors;
}

}  // namespace twinplane::kernels
