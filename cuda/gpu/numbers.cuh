// Element types, the types in which they are computed, and vectors of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../arguments.h"

namespace slurmrl::gpu {

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename W>
__device__ __forceinline__ W widen(float x) { return x; }
template <typename W>
__device__ __forceinline__ W widen(double x) { return static_cast<W>(x); }
template <typename W>
__device__ __forceinline__ W widen(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename W>
__device__ __forceinline__ W widen(__half x) { return __half2float(x); }

template <typename T, typename W>
__device__ __forceinline__ T narrow(W x) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(static_cast<float>(x));
    else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(static_cast<float>(x));
    else return static_cast<T>(x);
}

// Loaded and stored in accesses of up to 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
    T items[N];
};

template <typename Element>
__host__ __device__ inline bool aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % alignof(Element) == 0;
}

// Calls function with a null pointer of the type that dtype names.
template <typename Function>
auto with_type(Dtype dtype, Function function) {
    switch (dtype) {
        case Dtype::float64: return function(static_cast<double*>(nullptr));
        case Dtype::bfloat16: return function(static_cast<__nv_bfloat16*>(nullptr));
        case Dtype::float16: return function(static_cast<__half*>(nullptr));
        default: return function(static_cast<float*>(nullptr));
    }
}

}  // namespace slurmrl::gpu
