// The operators on a CPU. Free of torch, so that they can be tested under sanitizers alone.
#pragma once

#include <cstdint>

#include "../arguments.h"

namespace slurmrl::cpu {

// Calls body(part, context) once for each 0 <= part < parts, in any order and on any thread.
using Body = void (*)(int64_t part, void* context);
struct Pool {
    void (*run)(int64_t parts, Body body, void* context);
    int64_t threads;
};

// Softmax attention of each token over the first lengths[t] cells of its row, or the last window of
// them. Cell c of a row is cell c % page of its page number c / page.
// T tokens, R rows, C cells, D head size.
struct Paged {
    const float* q;         // [T, heads, D]
    const float* keys;      // [C, kv_heads, D]
    const float* values;    // the same
    const int64_t* tables;  // [R, row_pages]
    const int64_t* rows;    // [T]
    const int64_t* lengths; // [T], at least 1
    float* out;             // [T, heads, D]
    int64_t tokens, row_pages, page, heads, kv_heads, size;
    int64_t window;  // 0 for none
    float scale;
};

void gae(const Gae& arguments, const Pool& pool);
void scan(const Scan& arguments, const Pool& pool);
void move(const Move& arguments, const Pool& pool);
void blend(const Blend& arguments, const Pool& pool);
void paged(const Paged& arguments, const Pool& pool);

}  // namespace slurmrl::cpu
