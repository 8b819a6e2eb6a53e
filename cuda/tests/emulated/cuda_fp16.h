// CUDA's float16 on a CPU, for tests.
#pragma once

#include "../../cpu/numbers.h"

using __half = slurmrl::cpu::float16;

inline float __half2float(__half x) { return x; }
inline __half __float2half_rn(float x) { return __half(x); }
