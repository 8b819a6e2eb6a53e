// CUDA's bfloat16 on a CPU, for tests.
#pragma once

#include "../../cpu/numbers.h"

using __nv_bfloat16 = slurmrl::cpu::bfloat16;

inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
