// Attention of single tokens over pages of a key-value cache, in float32.
//
// Every sum has a fixed order that depends only on the token's own cells. The result of a token
// therefore does not depend on other tokens of a call, on threads, or on the width of the
// processor's vectors.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lanes.h"
#include "loops.h"

namespace slurmrl::cpu {
namespace {

SLURMRL_INLINE float largest(const Lanes& x) {
    float most = x[0];
    for (int64_t i = 1; i < lanes; ++i) most = std::max(most, x[i]);
    return most;
}

// Lanes 4g to 4g + 3 of the result: the sums over the same lanes of each of four vectors.
SLURMRL_INLINE Lanes quarters(const Lanes& a, const Lanes& b, const Lanes& c, const Lanes& d) {
    const Lanes ab =
        __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
        __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const Lanes cd =
        __builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
        __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    return __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28,
                                   29) +
           __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30,
                                   31);
}

// The sums of 16 vectors, from their quarters, four vectors each.
SLURMRL_INLINE Lanes sums(const Lanes& a, const Lanes& b, const Lanes& c, const Lanes& d) {
    const Lanes ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21,
                                             22, 23) +
                     __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28,
                                             29, 30, 31);
    const Lanes cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21,
                                             22, 23) +
                     __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28,
                                             29, 30, 31);
    return __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26,
                                   27) +
           __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30,
                                   31);
}

struct Row {
    const float* q;        // of the heads that share a key head [group, size]
    const float* keys;     // of that key head, at cell 0
    const float* values;   // the same
    const int64_t* cells;  // [padded], in elements from cell 0; after count, one cell repeats
    float* scores;         // [group, padded]
    float* out;            // [group, size]
    int64_t count, padded, group, size;
    float scale;
    const float* sinks;  // [group], or null
};

SLURMRL_INLINE Lanes products(const float* a, const float* b, int64_t size) {
    Lanes total{};
    int64_t d = 0;
    for (; d + lanes <= size; d += lanes) total += load(a + d) * load(b + d);
    if (d < size) total += load(a + d, size - d) * load(b + d, size - d);
    return total;
}

// The products of a query with the keys of 16 cells. A size known to the compiler is faster.
SLURMRL_INLINE Lanes dots(const float* q, const float* keys, const int64_t* cells, int64_t size) {
    Lanes parts[4];
    for (int64_t i = 0; i < 4; ++i) {
        const int64_t* own = cells + 4 * i;
        parts[i] = quarters(products(q, keys + own[0], size), products(q, keys + own[1], size),
                            products(q, keys + own[2], size), products(q, keys + own[3], size));
    }
    return sums(parts[0], parts[1], parts[2], parts[3]);
}

SLURMRL_INLINE void score(const Row& row, int64_t size) {
    for (int64_t c = 0; c < row.padded; c += lanes) {
        for (int64_t head = 0; head < row.group; ++head) {
            const Lanes x = dots(row.q + head * size, row.keys, row.cells + c, size) * row.scale;
            store(row.scores + head * row.padded + c, x);
        }
    }
}

// Replace scores by e^(score - largest), and by 0 after the last cell. Return their sum, including
// the sink.
SLURMRL_INLINE float weigh(float* scores, int64_t count, int64_t padded, const float* sink) {
    for (int64_t c = count; c < padded; ++c) scores[c] = -std::numeric_limits<float>::infinity();
    Lanes most = load(scores), total{};
    for (int64_t c = lanes; c < padded; c += lanes) {
        const Lanes x = load(scores + c);
        most = x > most ? x : most;
    }
    const float own = largest(most), top = sink ? std::max(own, *sink) : own;
    for (int64_t c = 0; c < padded; c += lanes) {
        const Lanes p = exponential(load(scores + c) - top);
        store(scores + c, p);
        total += p;
    }
    return sink ? sum(total) + std::exp(*sink - top) : sum(total);
}

// The weighted sums of some lanes of the values, for some heads.
template <int64_t heads, int64_t chunks>
SLURMRL_INLINE void mix(const Row& row, int64_t head, int64_t d, const float* factors) {
    Lanes totals[heads][chunks] = {};
    const float* scores = row.scores + head * row.padded;
    for (int64_t c = 0; c < row.count; ++c) {
        const float* value = row.values + row.cells[c] + d;
        for (int64_t i = 0; i < chunks; ++i) {
            const Lanes x = load(value + i * lanes);
            for (int64_t h = 0; h < heads; ++h) totals[h][i] += x * scores[h * row.padded + c];
        }
    }
    for (int64_t h = 0; h < heads; ++h) {
        float* out = row.out + (head + h) * row.size + d;
        for (int64_t i = 0; i < chunks; ++i) {
            store(out + i * lanes, totals[h][i] * factors[head + h]);
        }
    }
}

template <int64_t heads>
SLURMRL_INLINE void mix_all(const Row& row, int64_t head, const float* factors) {
    int64_t d = 0;
    for (; d + 4 * lanes <= row.size; d += 4 * lanes) mix<heads, 4>(row, head, d, factors);
    for (; d + 2 * lanes <= row.size; d += 2 * lanes) mix<heads, 2>(row, head, d, factors);
    for (; d + lanes <= row.size; d += lanes) mix<heads, 1>(row, head, d, factors);
    const int64_t rest = row.size - d;
    for (int64_t h = 0; rest && h < heads; ++h) {
        const float* scores = row.scores + (head + h) * row.padded;
        Lanes total{};
        for (int64_t c = 0; c < row.count; ++c) {
            total += load(row.values + row.cells[c] + d, rest) * scores[c];
        }
        store(row.out + (head + h) * row.size + d, total * factors[head + h], rest);
    }
}

// factors: buffer for one number per head.
SLURMRL_WIDEST void attend(const Row& row, float* factors) {
    switch (row.size) {
        case 32: score(row, 32); break;
        case 64: score(row, 64); break;
        case 128: score(row, 128); break;
        default: score(row, row.size);
    }
    for (int64_t head = 0; head < row.group; ++head) {
        factors[head] = 1.0F / weigh(row.scores + head * row.padded, row.count, row.padded,
                                     row.sinks ? row.sinks + head : nullptr);
    }
    int64_t head = 0;
    for (; head + 2 <= row.group; head += 2) mix_all<2>(row, head, factors);
    for (; head < row.group; ++head) mix_all<1>(row, head, factors);
}

// Finds the places of the cells to which a token attends, and returns their number. Repeats the
// last cell up to a multiple of the lanes.
int64_t find_cells(const Paged& p, int64_t token, std::vector<int64_t>& cells) {
    const int64_t length = p.lengths[token], stride = p.kv_heads * p.size;
    const int64_t first = p.window ? std::max<int64_t>(0, length - p.window) : 0;
    const int64_t* pages = p.tables + p.rows[token] * p.row_pages;
    cells.clear();
    for (int64_t c = first; c < length;) {
        const int64_t page = c / p.page, end = std::min(length, (page + 1) * p.page);
        int64_t cell = (pages[page] * p.page + c - page * p.page) * stride;
        for (; c < end; ++c, cell += stride) cells.push_back(cell);
    }
    cells.resize(static_cast<size_t>((length - first + lanes - 1) / lanes * lanes), cells.back());
    return length - first;
}

// q: the token's queries [heads, size].
void attend_token(const Paged& p, int64_t token, const float* q, std::vector<int64_t>& cells,
                  std::vector<float>& scores) {
    const int64_t count = find_cells(p, token, cells), group = p.heads / p.kv_heads;
    const auto padded = static_cast<int64_t>(cells.size());
    scores.resize(static_cast<size_t>(group * (padded + 1)));
    for (int64_t head = 0; head < p.kv_heads; ++head) {
        const int64_t own = head * group * p.size;
        attend({q + own, p.keys + head * p.size, p.values + head * p.size, cells.data(),
                scores.data(), p.out + token * p.heads * p.size + own, count, padded, group,
                p.size, p.scale, p.sinks ? p.sinks + head * group : nullptr},
               scores.data() + group * padded);
    }
}

// Writes the rotated key and the value of a token into its cell.
SLURMRL_WIDEST void keep(const Decode& d, int64_t token) {
    const Paged& p = d.paged;
    const int64_t row = p.kv_heads * p.size, cell = d.slots[token] * row;
    const float* key = d.heads + token * (p.heads + 2 * p.kv_heads) * p.size + p.heads * p.size;
    std::copy_n(key + row, row, d.values + cell);
    if (!d.cos) {
        std::copy_n(key, row, d.keys + cell);
        return;
    }
    const float *cos = d.cos + token * p.size, *sin = d.sin + token * p.size;
    for (int64_t head = 0; head < row; head += p.size) {
        turn(key + head, cos, sin, 1.0F, p.size, d.keys + cell + head);
    }
}

SLURMRL_WIDEST void turn_queries(const Decode& d, int64_t token, float* out) {
    const Paged& p = d.paged;
    const float* q = d.heads + token * (p.heads + 2 * p.kv_heads) * p.size;
    const float *cos = d.cos + token * p.size, *sin = d.sin + token * p.size;
    for (int64_t head = 0; head < p.heads * p.size; head += p.size) {
        turn(q + head, cos, sin, 1.0F, p.size, out + head);
    }
}

// Calls body(token) for all tokens, on the pool's threads.
template <typename F>
void for_each_token(int64_t tokens, const Pool& pool, F body) {
    if (pool.threads > 1) {
        pool.run(tokens, [](int64_t token, void* f) { (*static_cast<F*>(f))(token); }, &body);
        return;
    }
    for (int64_t token = 0; token < tokens; ++token) body(token);
}

thread_local std::vector<int64_t> own_cells;
thread_local std::vector<float> own_scores, own_queries;

}  // namespace

void paged(const Paged& p, const Pool& pool) {
    for_each_token(p.tokens, pool, [&](int64_t token) {
        attend_token(p, token, p.q + token * p.heads * p.size, own_cells, own_scores);
    });
}

void decode(const Decode& d, const Pool& pool) {
    const Paged& p = d.paged;
    for_each_token(p.tokens, pool, [&](int64_t token) { keep(d, token); });
    for_each_token(p.tokens, pool, [&](int64_t token) {
        const float* q = d.heads + token * (p.heads + 2 * p.kv_heads) * p.size;
        if (d.cos) {
            own_queries.resize(static_cast<size_t>(p.heads * p.size));
            turn_queries(d, token, own_queries.data());
            q = own_queries.data();
        }
        attend_token(p, token, q, own_cells, own_scores);
    });
}

}  // namespace slurmrl::cpu
