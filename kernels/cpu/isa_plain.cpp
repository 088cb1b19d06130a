// The kernels compiled for one instruction set (flags in CMakeLists.txt).
#include "kernels/cpu/simd_plain.hpp"

#define TWINPLANE_ISA plain
#include "kernels/cpu/isa.inl"
