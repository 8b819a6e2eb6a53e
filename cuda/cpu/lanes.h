// Vectors of 16 float32 numbers, independent of the width of the processor's vectors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__gnu_linux__)
#define SLURMRL_WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SLURMRL_WIDEST
#endif
#define SLURMRL_INLINED __attribute__((always_inline))
#define SLURMRL_INLINE SLURMRL_INLINED inline

// The calling convention for vectors does not matter, because every function that takes them is
// inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace slurmrl::cpu {

constexpr int64_t lanes = 16;
typedef float Lanes __attribute__((vector_size(sizeof(float) * lanes)));
typedef int32_t Bits __attribute__((vector_size(sizeof(int32_t) * lanes)));

SLURMRL_INLINE Lanes load(const float* from) {
    Lanes x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

SLURMRL_INLINE void store(float* to, const Lanes& x) { std::memcpy(to, &x, sizeof x); }

SLURMRL_INLINE Lanes load(const float* from, int64_t count) {
    Lanes x{};
    std::memcpy(&x, from, sizeof(float) * static_cast<size_t>(count));
    return x;
}

SLURMRL_INLINE void store(float* to, const Lanes& x, int64_t count) {
    std::memcpy(to, &x, sizeof(float) * static_cast<size_t>(count));
}

SLURMRL_INLINE float sum(Lanes x) {
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return x[0] + x[1];
}

// e^x for x <= 0, to about one unit in the last place; 0 below -87.
SLURMRL_INLINE Lanes exponential(Lanes x) {
    const Lanes low = Lanes{} - 87.0F;
    const auto tiny = x < low;
    x = tiny ? low : x;
    // n = round(x / ln 2) by adding and subtracting 1.5 2^23; then e^x = 2^n e^r, |r| <= ln 2 / 2.
    const Lanes shifted = x * 1.44269504F + 12582912.0F;
    const Lanes n = shifted - 12582912.0F;
    const Lanes r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
    Lanes p = r * 1.9875691500e-4F + 1.3981999507e-3F;
    p = p * r + 8.3334519073e-3F;
    p = p * r + 4.1665795894e-2F;
    p = p * r + 1.6666665459e-1F;
    p = p * r + 5.0000001201e-1F;
    p = p * r * r + r + 1.0F;
    const Bits power = (__builtin_convertvector(n, Bits) + 127) << 23;
    Lanes scale;
    std::memcpy(&scale, &power, sizeof scale);
    p *= scale;
    return tiny ? Lanes{} : p;
}

SLURMRL_INLINE Lanes get(const float* from, int64_t count) {
    return count == lanes ? load(from) : load(from, count);
}

SLURMRL_INLINE void put(float* to, const Lanes& x, int64_t count) {
    count == lanes ? store(to, x) : store(to, x, count);
}

// Calls f(place, count) for the vectors of a row; the last may have fewer elements.
template <typename F>
SLURMRL_INLINE void over(int64_t size, F f) {
    int64_t i = 0;
    for (; i + lanes <= size; i += lanes) f(i, lanes);
    if (i < size) f(i, size - i);
}

// Rotates the pairs (i, i + size / 2) of a head by a token's angles. A sign of -1 rotates them
// back.
SLURMRL_INLINE void turn(const float* x, const float* cos, const float* sin, float sign,
                         int64_t size, float* out) {
    const int64_t half = size / 2;
    over(half, [&](int64_t i, int64_t count) SLURMRL_INLINED {
        const Lanes a = get(x + i, count), b = get(x + half + i, count);
        const Lanes turned_a = b * get(sin + i, count), turned_b = a * get(sin + half + i, count);
        put(out + i, a * get(cos + i, count) + turned_a * sign, count);
        put(out + half + i, b * get(cos + half + i, count) + turned_b * sign, count);
    });
}

}  // namespace slurmrl::cpu
