// Attention of single tokens over pages of a key-value cache, in float32.
//
// Every sum has a fixed order that depends on the token's own cells only, so a token's result does
// not depend on the others of a call, on threads, or on the width of the processor's vectors.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "loops.h"

#if defined(__x86_64__) && defined(__gnu_linux__)
#define SLURMRL_WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SLURMRL_WIDEST
#endif
#define SLURMRL_INLINE __attribute__((always_inline)) inline

namespace slurmrl::cpu {
namespace {

constexpr int64_t lanes = 16;
typedef float Lanes __attribute__((vector_size(sizeof(float) * lanes)));
typedef int32_t Bits __attribute__((vector_size(sizeof(int32_t) * lanes)));

SLURMRL_INLINE Lanes load(const float* from) {
    Lanes x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

SLURMRL_INLINE void store(float* to, const Lanes& x) { std::memcpy(to, &x, sizeof x); }

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

struct Row {
    const float* q;        // of the heads that share a key head [group, size]
    const float* keys;     // of that key head, at cell 0
    const float* values;   // the same
    const int64_t* cells;  // [count], in elements from cell 0
    float* scores;         // [count] and room for the lanes
    float* out;            // [group, size]
    int64_t count, group, size;
    float scale;
};

SLURMRL_INLINE float dot(const float* a, const float* b, int64_t size) {
    Lanes total{};
    int64_t d = 0;
    for (; d + lanes <= size; d += lanes) total += load(a + d) * load(b + d);
    float rest = 0;
    for (; d < size; ++d) rest += a[d] * b[d];
    return sum(total) + rest;
}

SLURMRL_INLINE float weights(const Row& row, const float* q) {
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t c = 0; c < row.count; ++c) {
        row.scores[c] = dot(q, row.keys + row.cells[c], row.size) * row.scale;
        most = std::max(most, row.scores[c]);
    }
    for (int64_t c = row.count; c % lanes; ++c) {
        row.scores[c] = -std::numeric_limits<float>::infinity();
    }
    Lanes total{};
    for (int64_t c = 0; c < row.count; c += lanes) {
        const Lanes p = exponential(load(row.scores + c) - most);
        store(row.scores + c, p);
        total += p;
    }
    return sum(total);
}

template <int64_t count>
SLURMRL_INLINE void mix(const Row& row, float* out, int64_t d, float factor) {
    Lanes totals[count] = {};
    for (int64_t c = 0; c < row.count; ++c) {
        const float* value = row.values + row.cells[c] + d;
        for (int64_t i = 0; i < count; ++i) totals[i] += load(value + i * lanes) * row.scores[c];
    }
    for (int64_t i = 0; i < count; ++i) store(out + d + i * lanes, totals[i] * factor);
}

SLURMRL_WIDEST void attend(const Row& row) {
    for (int64_t head = 0; head < row.group; ++head) {
        float* out = row.out + head * row.size;
        const float factor = 1.0F / weights(row, row.q + head * row.size);
        int64_t d = 0;
        for (; d + 4 * lanes <= row.size; d += 4 * lanes) mix<4>(row, out, d, factor);
        for (; d + lanes <= row.size; d += lanes) mix<1>(row, out, d, factor);
        for (; d < row.size; ++d) {
            float total = 0;
            for (int64_t c = 0; c < row.count; ++c) {
                total += row.scores[c] * row.values[row.cells[c] + d];
            }
            out[d] = total * factor;
        }
    }
}

void attend_token(const Paged& p, int64_t token, std::vector<int64_t>& cells,
                  std::vector<float>& scores) {
    const int64_t length = p.lengths[token], stride = p.kv_heads * p.size;
    const int64_t first = p.window ? std::max<int64_t>(0, length - p.window) : 0;
    const int64_t* pages = p.tables + p.rows[token] * p.row_pages;
    cells.clear();
    for (int64_t c = first; c < length; ++c) {
        cells.push_back((pages[c / p.page] * p.page + c % p.page) * stride);
    }
    scores.resize(static_cast<size_t>(length - first + lanes));
    const int64_t group = p.heads / p.kv_heads;
    for (int64_t head = 0; head < p.kv_heads; ++head) {
        const int64_t own = (token * p.heads + head * group) * p.size;
        attend({p.q + own, p.keys + head * p.size, p.values + head * p.size, cells.data(),
                scores.data(), p.out + own, length - first, group, p.size, p.scale});
    }
}

}  // namespace

void paged(const Paged& p, const Pool& pool) {
    const auto body = [](int64_t token, void* context) {
        thread_local std::vector<int64_t> cells;
        thread_local std::vector<float> scores;
        attend_token(*static_cast<const Paged*>(context), token, cells, scores);
    };
    if (pool.threads > 1) {
        pool.run(p.tokens, body, const_cast<Paged*>(&p));
        return;
    }
    for (int64_t token = 0; token < p.tokens; ++token) body(token, const_cast<Paged*>(&p));
}

}  // namespace slurmrl::cpu
