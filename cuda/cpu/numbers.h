// 16-bit floating-point numbers, and the type in which each type is computed.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "../arguments.h"

namespace slurmrl::cpu {

struct bfloat16 {
    uint16_t bits;

    bfloat16() = default;
    explicit bfloat16(float value) {
        const auto wide = std::bit_cast<uint32_t>(value);
        const bool nan = value != value;
        // Round to nearest, ties to even. A carry into the exponent is correct.
        bits = nan ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    }
    operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

struct float16 {
    uint16_t bits;

    float16() = default;
    explicit float16(float value) {
        const auto wide = std::bit_cast<uint32_t>(value);
        const auto sign = static_cast<uint16_t>((wide >> 16) & 0x8000);
        const uint32_t size = wide & 0x7fffffff;
        if (size > 0x7f800000) {
            bits = sign | 0x7e00;  // NaN
        } else if (size >= 0x477ff000) {
            bits = sign | 0x7c00;  // 65520 and more round to infinity
        } else if (size < 0x38800000) {
            // Below 2^-14: adding 0.5 moves the last place of a half to the last place of a float.
            const float shifted = std::bit_cast<float>(size) + 0.5F;
            bits = sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(shifted) - 0x3f000000);
        } else {
            const uint32_t rounded = size + 0xfff + ((size >> 13) & 1);
            bits = sign | static_cast<uint16_t>((rounded - 0x38000000) >> 13);
        }
    }
    operator float() const {
        const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
        const uint32_t size = static_cast<uint32_t>(bits & 0x7fff) << 13;
        uint32_t wide = size + 0x38000000;
        if (size >= 0x0f800000) {
            wide = size + 0x70000000;  // infinity and NaN
        } else if (size < 0x00800000) {
            // Below 2^-14: read as a float of at least 2^-14, minus 2^-14.
            wide = std::bit_cast<uint32_t>(std::bit_cast<float>(size + 0x38800000) - 0x1p-14F);
        }
        return std::bit_cast<float>(sign | wide);
    }
};

// Type in which sums of T are computed and returned.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls function with a null pointer of the type that dtype names.
template <typename Function>
void with_type(Dtype dtype, Function function) {
    switch (dtype) {
        case Dtype::float32: return function(static_cast<float*>(nullptr));
        case Dtype::float64: return function(static_cast<double*>(nullptr));
        case Dtype::bfloat16: return function(static_cast<bfloat16*>(nullptr));
        case Dtype::float16: return function(static_cast<float16*>(nullptr));
    }
}

}  // namespace slurmrl::cpu
