// Arguments of the operators' loops: raw pointers, counts and types, without torch and CUDA. T
// packed tokens, S sequences, N intervals.
#pragma once

#include <cstdint>

namespace slurmrl {

enum class Dtype : int32_t { float32, float64, bfloat16, float16 };

// Row offsets cu[S + 1], as 32-bit or 64-bit integers.
struct Offsets {
    const void* data;
    bool wide;
};

// advantages_t = delta_t + gamma lam advantages_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, and
// returns_t = advantages_t + V_t.
struct Gae {
    const void* rewards;           // [T] in dtype
    const void* values;            // [T + S] in dtype, one more per sequence; or [T]
    const void* bootstrap_values;  // [S] in dtype where values is [T], else null
    const bool* truncated;         // [S]; where false, the value after the last token is 0
    Offsets cu_seqlens;
    void* advantages;  // [T] in float64 for float64, in float32 for all other types
    void* returns;     // the same
    int64_t tokens;
    int64_t sequences;
    double gamma;
    double lam;
    Dtype dtype;
};

// y_t = x_t + factor decay_t y_{t+1} within each sequence; after its last token, y is tail.
struct Scan {
    const void* x;      // [T] in dtype
    const void* decay;  // [T] in dtype, or null for ones
    const void* tail;   // [S] in dtype, or null for zeros
    Offsets cu_seqlens;
    void* y;  // [T] in float64 for float64, in float32 for all other types
    int64_t tokens;
    int64_t sequences;
    double factor;
    Dtype dtype;
};

// Packed elements offsets[i] <= k < offsets[i + 1] belong to elements starts[i] + k - offsets[i] of
// the other, scattered buffer.
struct Intervals {
    const int64_t* starts;   // [N]
    const int64_t* offsets;  // [N + 1], from 0 to total
    int64_t count;
    int64_t total;
};

// Copy of elements of one size without conversion.
struct Move {
    const void* source;
    void* target;
    Intervals intervals;
    int64_t item_bytes;  // 1, 2, 4, 8 or 16
    bool gather;         // the source is scattered and the target packed; else the other way round
};

// Copy of floating-point elements with conversion. With eta = 1 the old content of the target is
// not read. Otherwise target = eta source + (1 - eta) target.
struct Blend {
    const void* source;
    void* target;
    Intervals intervals;
    Dtype source_dtype;
    Dtype target_dtype;
    double eta;
    bool gather;
};

}  // namespace slurmrl
