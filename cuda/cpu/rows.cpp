// Passes over rows in float32: norms, gated products and rotations, and their gradients. Each pass
// reads and writes every element once. torch would make several passes.
//
// The results of a row depend only on this row. Sums over rows consist of blocks of a fixed number
// of rows, so they do not depend on threads.

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "loops.h"
#include "parts.h"

namespace slurmrl::cpu {
namespace {

constexpr int64_t block_rows = 256;

SLURMRL_WIDEST void norm_rows(const Norm& n, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const float* x = n.x + row * n.size;
        float* out = n.out + row * n.size;
        Lanes squares{};
        over(n.size, [&](int64_t i, int64_t count) SLURMRL_INLINED {
            const Lanes part = get(x + i, count);
            squares += part * part;
        });
        const float scale = 1.0F / std::sqrt(sum(squares) / static_cast<float>(n.size) + n.eps);
        n.scales[row] = scale;
        over(n.size, [&](int64_t i, int64_t count) SLURMRL_INLINED {
            put(out + i, get(x + i, count) * scale * (get(n.weight + i, count) + n.offset), count);
        });
    }
}

// grad_weight: the sum over only these rows.
SLURMRL_WIDEST void norm_gradient_rows(const NormGradient& n, int64_t first, int64_t last,
                                       float* grad_weight) {
    std::fill_n(grad_weight, n.size, 0.0F);
    for (int64_t row = first; row < last; ++row) {
        const float *x = n.x + row * n.size, *grad = n.grad + row * n.size;
        float* grad_x = n.grad_x + row * n.size;
        const float scale = n.scales[row];
        Lanes along{};
        over(n.size, [&](int64_t i, int64_t count) SLURMRL_INLINED {
            const Lanes product = get(grad + i, count) * (get(x + i, count) * scale);
            put(grad_weight + i, get(grad_weight + i, count) + product, count);
            along += product * (get(n.weight + i, count) + n.offset);
        });
        const float mean = sum(along) / static_cast<float>(n.size);
        over(n.size, [&](int64_t i, int64_t count) SLURMRL_INLINED {
            const Lanes factor = get(n.weight + i, count) + n.offset;
            const Lanes normed = get(x + i, count) * scale;
            put(grad_x + i, (get(grad + i, count) * factor - normed * mean) * scale, count);
        });
    }
}

// 1 / (1 + e^-x)
SLURMRL_INLINE Lanes sigmoid(const Lanes& x) {
    const auto negative = x < 0.0F;
    const Lanes small = exponential(negative ? x : -x);
    return (negative ? small : Lanes{} + 1.0F) / (small + 1.0F);
}

SLURMRL_WIDEST void gate_rows(const Gated& g, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const float *gate = g.gate + row * g.stride, *up = g.up + row * g.stride;
        float* product = g.product + row * g.size;
        over(g.size, [&](int64_t i, int64_t count) SLURMRL_INLINED {
            const Lanes x = get(gate + i, count);
            put(product + i, x * sigmoid(x) * get(up + i, count), count);
        });
    }
}

SLURMRL_WIDEST void gate_gradient_rows(const Gated& g, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const float *gate = g.gate + row * g.stride, *up = g.up + row * g.stride;
        const float* grad = g.grad + row * g.size;
        float* product = g.product + row * g.size;
        float* gradients = g.gradients + 2 * row * g.size;
        over(g.size, [&](int64_t i, int64_t count) SLURMRL_INLINED {
            const Lanes x = get(gate + i, count), y = get(up + i, count);
            const Lanes incoming = get(grad + i, count), s = sigmoid(x), value = x * s;
            put(product + i, value * y, count);
            put(gradients + i, incoming * y * (s + value * (1.0F - s)), count);
            put(gradients + g.size + i, incoming * value, count);
        });
    }
}

SLURMRL_WIDEST void rotate_tokens(const Rotation& r, int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
        const float *cos = r.cos + token * r.size, *sin = r.sin + token * r.size;
        for (int64_t head = 0; head < r.heads; ++head) {
            turn(r.x + token * r.stride + head * r.size, cos, sin, r.sign, r.size,
                 r.out + (token * r.heads + head) * r.size);
        }
    }
}

// Calls rows(first, last) for shares of the rows.
template <typename Rows>
void share(int64_t count, int64_t size, const Pool& pool, Rows rows) {
    const int64_t parts = number_of_parts(count * size, pool);
    for_each_part(parts, pool, [&](int64_t part) {
        rows(first_of_part(count, parts, part), first_of_part(count, parts, part + 1));
    });
}

}  // namespace

void norm(const Norm& n, const Pool& pool) {
    share(n.rows, n.size, pool,
          [&](int64_t first, int64_t last) { norm_rows(n, first, last); });
}

void norm_gradient(const NormGradient& n, const Pool& pool) {
    const int64_t blocks = (n.rows + block_rows - 1) / block_rows;
    std::vector<float> sums(static_cast<size_t>(blocks * n.size));
    share(blocks, block_rows * n.size, pool, [&](int64_t first, int64_t last) {
        for (int64_t block = first; block < last; ++block) {
            norm_gradient_rows(n, block * block_rows, std::min(n.rows, (block + 1) * block_rows),
                               sums.data() + block * n.size);
        }
    });
    std::fill_n(n.grad_weight, n.size, 0.0F);
    for (int64_t block = 0; block < blocks; ++block) {
        const float* own = sums.data() + block * n.size;
        for (int64_t i = 0; i < n.size; ++i) n.grad_weight[i] += own[i];
    }
}

void gated(const Gated& g, const Pool& pool) {
    share(g.rows, g.size, pool,
          [&](int64_t first, int64_t last) { gate_rows(g, first, last); });
}

void gated_gradient(const Gated& g, const Pool& pool) {
    share(g.rows, g.size, pool,
          [&](int64_t first, int64_t last) { gate_gradient_rows(g, first, last); });
}

void rotate(const Rotation& r, const Pool& pool) {
    share(r.tokens, r.heads * r.size, pool,
          [&](int64_t first, int64_t last) { rotate_tokens(r, first, last); });
}

}  // namespace slurmrl::cpu
