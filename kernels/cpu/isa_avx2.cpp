// The kernels compiled for one instruction set (flags in CMakeLists.txt).
#include "kernels/cpu/simd_avx2.hpp"

#define TWINPLANE_ISA avx2
#include "kernels/cpu/isa.inl"
