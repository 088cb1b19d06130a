// The kernels compiled for one instruction set (flags in CMakeLists.txt).
#include "kernels/cpu/simd_avx512.hpp"

#define TWINPLANE_ISA avx512
#include "kernels/cpu/isa.inl"
