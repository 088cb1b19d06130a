// Which instruction set runs.
#include <atomic>
#include <cstring>

#include "kernels/cpu/kernels.hpp"

namespace twinplane::kernels {

#if defined(TWINPLANE_X86)
namespace avx512 {
extern const Kernels kTable;
}
namespace avx2 {
extern const Kernels kTable;
}
#endif
namespace plain {
extern const Kernels kTable;
}

namespace {

const Kernels* find(const char* name) {
#if defined(TWINPLANE_X86)
  // libgcc's check includes that the operating system saves the registers.
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (std::strcmp(name, "avx512") == 0 && has_avx2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni"))
    return &avx512::kTable;
  if (std::strcmp(name, "avx2") == 0 && has_avx2) return &avx2::kTable;
#endif
  return std::strcmp(name, "plain") == 0 ? &plain::kTable : nullptr;
}

const Kernels* best() {
  for (const char* name : kInstructionSets)
    if (const Kernels* table = find(name)) return table;
  return &plain::kTable;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> table{best()};
  return table;
}

}  // namespace

const Kernels& active() { return *current().load(std::memory_order_acquire); }

bool supported(const char* name) { return find(name) != nullptr; }

bool select(const char* name) {
  const Kernels* table = find(name);
  if (table != nullptr) current().store(table, std::memory_order_release);
  return table != nullptr;
}

}  // namespace twinplane::kernels
