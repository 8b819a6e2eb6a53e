// Products of a few rows with a matrix in panels, in float32.
//
// Every element is one sum over the inner dimension, in the order of this dimension. The result of
// a row therefore does not depend on other rows or on threads. Processors with fused multiply-adds
// use them.

#include <algorithm>

#include "lanes.h"
#include "loops.h"
#include "parts.h"

#if defined(__x86_64__) && defined(__gnu_linux__)
#include <immintrin.h>
#define SLURMRL_X86
#endif

namespace slurmrl::cpu {
namespace {

constexpr int64_t vectors = panel / lanes;
// Number of rows that use a panel while it is in the first-level cache.
constexpr int64_t block_rows = 64;

// Sums of x[row * stride + i] * matrix[i * panel + column] over i, for some rows and all columns.
using Tile = void (*)(const float* x, int64_t stride, const float* matrix, int64_t inner,
                      float* sums);

template <int rows>
void tile_of_lanes(const float* x, int64_t stride, const float* matrix, int64_t inner,
                   float* sums) {
    Lanes totals[rows][vectors] = {};
    for (int64_t i = 0; i < inner; ++i, matrix += panel) {
        for (int row = 0; row < rows; ++row) {
            for (int64_t v = 0; v < vectors; ++v) {
                totals[row][v] += load(matrix + v * lanes) * x[row * stride + i];
            }
        }
    }
    std::memcpy(sums, totals, sizeof totals);
}

#ifdef SLURMRL_X86
template <int rows>
__attribute__((target("avx512f"))) void tile_of_512(const float* x, int64_t stride,
                                                    const float* matrix, int64_t inner,
                                                    float* sums) {
    __m512 totals[rows][2];
    for (auto& total : totals) total[0] = total[1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < inner; ++i, matrix += panel) {
        const __m512 first = _mm512_loadu_ps(matrix), second = _mm512_loadu_ps(matrix + 16);
        for (int row = 0; row < rows; ++row) {
            const __m512 factor = _mm512_set1_ps(x[row * stride + i]);
            totals[row][0] = _mm512_fmadd_ps(factor, first, totals[row][0]);
            totals[row][1] = _mm512_fmadd_ps(factor, second, totals[row][1]);
        }
    }
    for (int row = 0; row < rows; ++row) {
        _mm512_storeu_ps(sums + row * panel, totals[row][0]);
        _mm512_storeu_ps(sums + row * panel + 16, totals[row][1]);
    }
}

template <int rows>
__attribute__((target("avx2,fma"))) void tile_of_256(const float* x, int64_t stride,
                                                     const float* matrix, int64_t inner,
                                                     float* sums) {
    __m256 totals[rows][4];
    for (auto& row : totals) {
        for (auto& total : row) total = _mm256_setzero_ps();
    }
    for (int64_t i = 0; i < inner; ++i, matrix += panel) {
        for (int row = 0; row < rows; ++row) {
            const __m256 factor = _mm256_set1_ps(x[row * stride + i]);
            for (int v = 0; v < 4; ++v) {
                totals[row][v] =
                    _mm256_fmadd_ps(factor, _mm256_loadu_ps(matrix + 8 * v), totals[row][v]);
            }
        }
    }
    for (int row = 0; row < rows; ++row) {
        for (int v = 0; v < 4; ++v) _mm256_storeu_ps(sums + row * panel + 8 * v, totals[row][v]);
    }
}
#endif

constexpr int64_t most_rows = 12;

// The tiles of 1, 2, ... rows, and the number of rows of the fastest tile.
struct Tiles {
    Tile of[most_rows];
    int64_t rows;
};

#define SLURMRL_TILES_OF_3(name) name<1>, name<2>, name<3>
#define SLURMRL_TILES_OF_12(name) \
    SLURMRL_TILES_OF_3(name), name<4>, name<5>, name<6>, name<7>, name<8>, name<9>, name<10>, \
        name<11>, name<12>

const Tiles& tiles() {
    static const Tiles found = [] {
#ifdef SLURMRL_X86
        if (__builtin_cpu_supports("avx512f")) return Tiles{{SLURMRL_TILES_OF_12(tile_of_512)}, 12};
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
            return Tiles{{SLURMRL_TILES_OF_3(tile_of_256)}, 3};
        }
#endif
        return Tiles{{SLURMRL_TILES_OF_3(tile_of_lanes)}, 3};
    }();
    return found;
}

// out = sums + bias + added, for the columns of a panel.
SLURMRL_WIDEST void finish(const Product& p, const float* sums, int64_t row, int64_t rows,
                           int64_t column) {
    const int64_t columns = std::min(panel, p.outer - column);
    for (int64_t end = row + rows; row < end; ++row, sums += panel) {
        const int64_t at = row * p.outer + column;
        over(columns, [&](int64_t i, int64_t count) SLURMRL_INLINED {
            Lanes x = get(sums + i, count);
            if (p.bias) x += get(p.bias + column + i, count);
            if (p.added) x += get(p.added + at + i, count);
            put(p.out + at + i, x, count);
        });
    }
}

void multiply(const Product& p, int64_t number, int64_t row, int64_t end) {
    const Tiles& tile = tiles();
    const float* matrix = p.packed + number * p.inner * panel;
    float sums[most_rows * panel];
    while (row < end) {
        const int64_t rows = std::min(tile.rows, end - row);
        tile.of[rows - 1](p.x + row * p.stride, p.stride, matrix, p.inner, sums);
        finish(p, sums, row, rows, number * panel);
        row += rows;
    }
}

}  // namespace

void pack(const float* weight, int64_t outer, int64_t inner, float* packed) {
    for (int64_t first = 0; first < outer; first += panel) {
        const int64_t columns = std::min(panel, outer - first);
        for (int64_t i = 0; i < inner; ++i, packed += panel) {
            for (int64_t c = 0; c < columns; ++c) packed[c] = weight[(first + c) * inner + i];
            std::fill(packed + columns, packed + panel, 0.0F);
        }
    }
}

void product(const Product& p, const Pool& pool) {
    const int64_t panels = panels_of(p.outer), blocks = (p.rows + block_rows - 1) / block_rows;
    const int64_t units = panels * blocks;
    const int64_t parts = std::min(units, number_of_parts(p.rows * p.outer * p.inner, pool));
    if (parts == 0) return;
    for_each_part(parts, pool, [&](int64_t part) {
        const int64_t last = first_of_part(units, parts, part + 1);
        for (int64_t unit = first_of_part(units, parts, part); unit < last; ++unit) {
            const int64_t row = unit / panels * block_rows;
            multiply(p, unit % panels, row, std::min(p.rows, row + block_rows));
        }
    });
}

}  // namespace slurmrl::cpu
