// Which instruction set runs.
#include <atomic>
#include <cstring>

#include "kernels/cpu/kernels.hpp"

#if defined(TWINPLANE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
#if defined(TWINPLANE_AVX512_BF16)
namespace avx512_bf16 {
void attention_query(const AttentionTile&, void* scratch);
void attention_partition(const AttentionPartition&, const AttentionPartition& next, SoftmaxState* states, float* sums,
                         void* scratch);
}  // namespace avx512_bf16
#endif
#if defined(TWINPLANE_AMX)
namespace amx {
void panel_product(const PanelProduct&);
void split_activations(const float* x, int64_t x_stride, int64_t rows, int64_t depth, SplitTile* out);
void integer_product(const IntegerProduct&);
void after_job();
size_t attention_scratch(int64_t head_dim, int64_t value_dim);
void attention_query(const AttentionTile&, void* scratch);
void attention_partition(const AttentionPartition&, const AttentionPartition& next, SoftmaxState* states, float* sums,
                         void* scratch);
}  // namespace amx
#endif

namespace {

#if defined(TWINPLANE_AVX512_BF16)
// AVX-512 but for attention over FP8.
const Kernels* avx512_bf16_table() {
  static const Kernels table = [] {
    Kernels kernels = avx512::kTable;
    kernels.name = "avx512_bf16";
    kernels.attention_query = avx512_bf16::attention_query;
    kernels.attention_partition = avx512_bf16::attention_partition;
    return kernels;
  }();
  return __builtin_cpu_supports("avx512bf16") ? &table : nullptr;
}
#endif

#if defined(TWINPLANE_AMX)
// Whether the processor has tiles and the operating system lets this process use them, which it has to be asked for.
bool may_use_tiles() {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr uint32_t kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE and AMX-INT8 in EDX of leaf 7
  if ((edx & kNeeded) != kNeeded) return false;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, Linux 5.16
  constexpr long kTileData = 18;               // XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// AVX-512 with its bfloat16 but for the products and for attention over bfloat16.
const Kernels* amx_table() {
  static const bool may = avx512_bf16_table() != nullptr && may_use_tiles();
  static const Kernels table = [] {
    Kernels kernels = avx512::kTable;
    kernels.name = "amx";
    kernels.panel_product = amx::panel_product;
    kernels.split_activations = amx::split_activations;
    kernels.integer_product = amx::integer_product;
    kernels.after_job = amx::after_job;
    kernels.attention_scratch = amx::attention_scratch;
    kernels.attention_query = amx::attention_query;
    kernels.attention_partition = amx::attention_partition;
    return kernels;
  }();
  return may ? &table : nullptr;
}
#endif

const Kernels* find(const char* name) {
#if defined(TWINPLANE_X86)
  // libgcc's check includes that the operating system saves the registers.
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vnni");
#if defined(TWINPLANE_AMX)
  if (std::strcmp(name, "amx") == 0 && has_avx512) return amx_table();
#endif
#if defined(TWINPLANE_AVX512_BF16)
  if (std::strcmp(name, "avx512_bf16") == 0 && has_avx512) return avx512_bf16_table();
#endif
  if (std::strcmp(name, "avx512") == 0 && has_avx512) return &avx512::kTable;
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
