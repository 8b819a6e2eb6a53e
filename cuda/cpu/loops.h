// The operators on a CPU, without torch, so that tests can run them separately under sanitizers.
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
    const float* sinks;  // [heads]: a further score of each head, without a value; or null
};

// The attention of `Paged`, for queries, key and value that are adjacent in memory. The key is
// rotated by the token's angles and written with the value into the token's cell. Then the rotated
// queries attend.
struct Decode {
    Paged paged;          // without q
    const float* heads;   // [T, heads + 2 kv_heads, D]
    const float* cos;     // [T, D], every angle twice; null without rotation
    const float* sin;     // the same, negated in the first half
    const int64_t* slots; // [T]
    float* keys;          // keys of `paged`
    float* values;        // the same
};

// Rows x / sqrt(mean(x^2) + eps) * (weight + offset).
struct Norm {
    const float* x;       // [rows, size]
    const float* weight;  // [size]
    float* out;           // [rows, size]
    float* scales;        // [rows]: 1 / sqrt(mean(x^2) + eps)
    int64_t rows, size;
    float eps, offset;
};

struct NormGradient {
    const float* grad;    // [rows, size]
    const float* x;       // the same
    const float* weight;  // [size]
    const float* scales;  // [rows]
    float* grad_x;        // [rows, size]
    float* grad_weight;   // [size]
    int64_t rows, size;
    float offset;
};

// Rows silu(gate) * up.
struct Gated {
    const float* gate;  // [rows, size], `stride` from row to row
    const float* up;    // the same
    const float* grad;  // [rows, size], of the product; for the gradients only
    float* product;     // [rows, size]
    float* gradients;   // [rows, 2 size]: of gate and of up
    int64_t rows, size, stride;
};

// Rotation of the pairs (i, i + size / 2) of each head by the angles of its token.
struct Rotation {
    const float* x;    // [tokens, heads, size], `stride` from token to token
    const float* cos;  // [tokens, size], every angle twice
    const float* sin;  // the same, negated in the first half
    float* out;        // [tokens, heads, size]
    int64_t tokens, heads, size, stride;
    float sign;  // -1 rotates back
};

// Number of columns of a matrix that a panel of the packed matrix holds.
constexpr int64_t panel = 32;

inline int64_t panels_of(int64_t outer) { return (outer + panel - 1) / panel; }

// x W^T + bias + added, for a matrix W [outer, inner].
struct Product {
    const float* x;       // [rows, inner], `stride` from row to row
    const float* packed;  // [panels, inner, panel]: W by `pack`
    const float* bias;    // [outer], or null
    const float* added;   // [rows, outer], or null
    float* out;           // [rows, outer]; may be `added`
    int64_t rows, inner, outer, stride;
};

// A layer of a decoder during decoding: norm, projections, attention, and a gated product.
struct Layer {
    Decode decode;         // without heads
    const float* x;        // [T, hidden]
    const float* weights;  // parts in the order of `LayerWeights`
    float* out;            // [T, hidden]
    int64_t hidden, inner;
    float first_eps, second_eps;
};

void gae(const Gae& arguments, const Pool& pool);
void scan(const Scan& arguments, const Pool& pool);
void move(const Move& arguments, const Pool& pool);
void blend(const Blend& arguments, const Pool& pool);
void paged(const Paged& arguments, const Pool& pool);
void decode(const Decode& arguments, const Pool& pool);
void norm(const Norm& arguments, const Pool& pool);
void norm_gradient(const NormGradient& arguments, const Pool& pool);
void gated(const Gated& arguments, const Pool& pool);
void gated_gradient(const Gated& arguments, const Pool& pool);
void rotate(const Rotation& arguments, const Pool& pool);
// packed: [panels, inner, panel], with zeros after the last column.
void pack(const float* weight, int64_t outer, int64_t inner, float* packed);
void product(const Product& arguments, const Pool& pool);
void layer(const Layer& arguments, const Pool& pool);

}  // namespace slurmrl::cpu
