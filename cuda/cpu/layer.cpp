// A layer of a decoder in one call. With few tokens, the calls of separate operators would take
// longer than their computation.

#include <cstddef>
#include <memory>

#include "loops.h"

namespace slurmrl::cpu {
namespace {

// Places of the parts in a layer's weights, in this order.
struct LayerWeights {
    const float *first_norm, *qkv, *qkv_bias, *o, *o_bias;
    const float *second_norm, *gate_up, *gate_up_bias, *down, *down_bias;

    LayerWeights(const float* at, int64_t hidden, int64_t heads, int64_t mixed, int64_t inner) {
        const auto next = [&](int64_t count) {
            const float* part = at;
            at += count;
            return part;
        };
        const auto matrix = [&](int64_t outer, int64_t inner) {
            return next(panels_of(outer) * panel * inner);
        };
        first_norm = next(hidden);
        qkv = matrix(heads, hidden);
        qkv_bias = next(heads);
        o = matrix(hidden, mixed);
        o_bias = next(hidden);
        second_norm = next(hidden);
        gate_up = matrix(2 * inner, hidden);
        gate_up_bias = next(2 * inner);
        down = matrix(hidden, inner);
        down_bias = next(hidden);
    }
};

}  // namespace

void layer(const Layer& l, const Pool& pool) {
    const Paged& p = l.decode.paged;
    const int64_t rows = p.tokens, hidden = l.hidden, inner = l.inner;
    const int64_t mixed = p.heads * p.size, heads = mixed + 2 * p.kv_heads * p.size;
    const LayerWeights w(l.weights, hidden, heads, mixed, inner);
    const int64_t numbers = rows * (1 + hidden + heads + mixed + 3 * inner);
    const std::unique_ptr<float[]> room(new float[static_cast<size_t>(numbers)]);
    float* scales = room.get();
    float* normed = scales + rows;
    float* own_heads = normed + rows * hidden;
    float* attended = own_heads + rows * heads;
    float* halves = attended + rows * mixed;
    float* gated_rows = halves + rows * 2 * inner;

    norm({l.x, w.first_norm, normed, scales, rows, hidden, l.first_eps, 0.0F}, pool);
    product({normed, w.qkv, w.qkv_bias, nullptr, own_heads, rows, hidden, heads, hidden}, pool);
    Decode d = l.decode;
    d.heads = own_heads;
    d.paged.out = attended;
    decode(d, pool);
    product({attended, w.o, w.o_bias, l.x, l.out, rows, mixed, hidden, mixed}, pool);
    norm({l.out, w.second_norm, normed, scales, rows, hidden, l.second_eps, 0.0F}, pool);
    product({normed, w.gate_up, w.gate_up_bias, nullptr, halves, rows, hidden, 2 * inner, hidden},
            pool);
    gated({halves, halves + inner, nullptr, gated_rows, nullptr, rows, inner, 2 * inner}, pool);
    product({gated_rows, w.down, w.down_bias, l.out, l.out, rows, inner, hidden, inner}, pool);
}

}  // namespace slurmrl::cpu
