// Generalized advantages and discounted sums, sequence by sequence.
//
// The loops double the number of terms of a sum in each pass, in the order of
// slurmrl/tensors/ops/scan.py and without fused multiply-adds. The results are bit-identical to
// torch's, so a run does not depend on whether these loops could be compiled. A sequence is read
// log2(length) times, but it is in the cache, and no multiplication waits for the previous one.

#include <algorithm>
#include <cmath>
#include <memory>

#include "loops.h"
#include "numbers.h"
#include "parts.h"

// The loops are compiled for several instruction sets. The machine that runs them selects one,
// because hosts of a cluster share one build.
#if defined(__x86_64__) && defined(__GNUC__)
#define SLURMRL_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SLURMRL_EACH_CPU
#endif

#if defined(__clang__)
#define SLURMRL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define SLURMRL_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace slurmrl::cpu {
namespace {

// sums[t] += power sums[t + span], with the old value on the right.
template <typename T>
[[gnu::always_inline]] inline void double_terms(T* sums, int64_t first, int64_t stop, int64_t span,
                                                T power) {
    SLURMRL_INDEPENDENT
    for (int64_t t = first; t < stop; ++t) sums[t] = sums[t] + power * sums[t + span];
}

// Two doublings in one pass: first with `power` and `span`, then with `squared` and 2 span.
template <typename T>
[[gnu::always_inline]] inline void double_twice(T* sums, int64_t length, int64_t span, T power,
                                                T squared) {
    SLURMRL_INDEPENDENT
    for (int64_t t = 0; t < length - 3 * span; ++t) {
        const T near = sums[t] + power * sums[t + span];
        const T far = sums[t + 2 * span] + power * sums[t + 3 * span];
        sums[t] = near + squared * far;
    }
    SLURMRL_INDEPENDENT
    for (int64_t t = std::max<int64_t>(length - 3 * span, 0); t < length - 2 * span; ++t) {
        const T near = sums[t] + power * sums[t + span];
        sums[t] = near + squared * sums[t + 2 * span];
    }
    double_terms(sums, std::max<int64_t>(length - 2 * span, 0), length - span, span, power);
}

template <typename T>
[[gnu::always_inline]] inline void discount_as(T* sums, int64_t length, double factor) {
    int64_t span = 1;
    const auto power = [&](int64_t terms) { return std::pow(factor, static_cast<double>(terms)); };
    for (; 2 * span < length && power(2 * span) > 0.0; span *= 4) {
        double_twice(sums, length, span, static_cast<T>(power(span)),
                     static_cast<T>(power(2 * span)));
    }
    if (span < length && power(span) > 0.0) {
        double_terms(sums, 0, length - span, span, static_cast<T>(power(span)));
    }
}
SLURMRL_EACH_CPU void discount(float* sums, int64_t length, double factor) {
    discount_as(sums, length, factor);
}
SLURMRL_EACH_CPU void discount(double* sums, int64_t length, double factor) {
    discount_as(sums, length, factor);
}

// Discounted sums with a factor per token: factors[t] is the product of the factors of its terms. If
// this product is 0, later values do not count, even if they are infinite.
template <typename T>
[[gnu::always_inline]] inline void discount_as(T* sums, T* factors, int64_t length) {
    for (int64_t span = 1; span < length; span *= 2) {
        SLURMRL_INDEPENDENT
        for (int64_t t = 0; t < length - span; ++t) {
            const T further = factors[t] * sums[t + span];
            sums[t] = factors[t] == T(0) ? sums[t] : sums[t] + further;
            factors[t] = factors[t] * factors[t + span];
        }
    }
}
SLURMRL_EACH_CPU void discount(float* sums, float* factors, int64_t length) {
    discount_as(sums, factors, length);
}
SLURMRL_EACH_CPU void discount(double* sums, double* factors, int64_t length) {
    discount_as(sums, factors, length);
}

int64_t offset(const Offsets& offsets, int64_t index) {
    return offsets.wide ? static_cast<const int64_t*>(offsets.data)[index]
                        : static_cast<const int32_t*>(offsets.data)[index];
}

// The first sequence that starts at a token or after it.
int64_t first_sequence(const Offsets& offsets, int64_t sequences, int64_t token) {
    int64_t low = 0, high = sequences;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (offset(offsets, middle) < token) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Calls function(first, last) with ranges of sequences that have about as many tokens each.
template <typename Function>
void for_sequences(const Offsets& cu, int64_t tokens, int64_t sequences, const Pool& pool,
                   Function function) {
    const int64_t parts = number_of_parts(tokens, pool);
    for_each_part(parts, pool, [&](int64_t part) {
        const int64_t begin = first_of_part(tokens, parts, part);
        const int64_t end = first_of_part(tokens, parts, part + 1);
        const int64_t last = part + 1 == parts ? sequences : first_sequence(cu, sequences, end);
        function(first_sequence(cu, sequences, begin), last);
    });
}

template <typename T, typename W>
void advantages_of(const T* rewards, const T* values, W behind_end, int64_t length, const Gae& g,
                   W* advantages, W* returns) {
    const W gamma = static_cast<W>(g.gamma);
    const auto delta = [&](int64_t t, W behind) {
        return static_cast<W>(rewards[t]) + gamma * behind - static_cast<W>(values[t]);
    };
    if (length == 0) return;
    for (int64_t t = 0; t < length - 1; ++t) {
        advantages[t] = delta(t, static_cast<W>(values[t + 1]));
    }
    advantages[length - 1] = delta(length - 1, behind_end);
    discount(advantages, length, g.gamma * g.lam);
    for (int64_t t = 0; t < length; ++t) {
        returns[t] = advantages[t] + static_cast<W>(values[t]);
    }
}

template <typename T>
void gae_of(const Gae& g, int64_t first, int64_t last) {
    using W = Wide<T>;
    const auto* rewards = static_cast<const T*>(g.rewards);
    const auto* values = static_cast<const T*>(g.values);
    const auto* bootstrap = static_cast<const T*>(g.bootstrap_values);
    for (int64_t s = first; s < last; ++s) {
        const int64_t begin = offset(g.cu_seqlens, s);
        const int64_t length = offset(g.cu_seqlens, s + 1) - begin;
        const T* own = values + begin + (bootstrap == nullptr ? s : 0);
        W behind_end = 0;
        if (g.truncated[s]) {
            behind_end = static_cast<W>(bootstrap == nullptr ? own[length] : bootstrap[s]);
        }
        advantages_of(rewards + begin, own, behind_end, length, g,
                      static_cast<W*>(g.advantages) + begin, static_cast<W*>(g.returns) + begin);
    }
}

template <typename T>
void scan_of(const Scan& g, int64_t first, int64_t last) {
    using W = Wide<T>;
    const auto* x = static_cast<const T*>(g.x);
    const auto* decay = static_cast<const T*>(g.decay);
    const auto* tail = static_cast<const T*>(g.tail);
    auto* y = static_cast<W*>(g.y);
    const W factor = static_cast<W>(g.factor);
    int64_t longest = 0;
    for (int64_t s = first; s < last; ++s) {
        longest = std::max(longest, offset(g.cu_seqlens, s + 1) - offset(g.cu_seqlens, s));
    }
    std::unique_ptr<W[]> factors(decay == nullptr ? nullptr : new W[longest]);
    for (int64_t s = first; s < last; ++s) {
        const int64_t begin = offset(g.cu_seqlens, s);
        const int64_t length = offset(g.cu_seqlens, s + 1) - begin;
        if (length == 0) continue;
        W* sums = y + begin;
        W end_factor = factor;
        for (int64_t t = 0; t < length; ++t) sums[t] = static_cast<W>(x[begin + t]);
        if (decay != nullptr) {
            for (int64_t t = 0; t < length; ++t) {
                factors[t] = factor * static_cast<W>(decay[begin + t]);
            }
            end_factor = factors[length - 1];
        }
        if (tail != nullptr && end_factor != W(0)) {
            sums[length - 1] += end_factor * static_cast<W>(tail[s]);
        }
        if (decay == nullptr) discount(sums, length, g.factor);
        else discount(sums, factors.get(), length);
    }
}

}  // namespace

void gae(const Gae& arguments, const Pool& pool) {
    with_type(arguments.dtype, [&](auto* type) {
        for_sequences(arguments.cu_seqlens, arguments.tokens, arguments.sequences, pool,
                      [&](int64_t first, int64_t last) {
                          gae_of<std::remove_pointer_t<decltype(type)>>(arguments, first, last);
                      });
    });
}

void scan(const Scan& arguments, const Pool& pool) {
    with_type(arguments.dtype, [&](auto* type) {
        for_sequences(arguments.cu_seqlens, arguments.tokens, arguments.sequences, pool,
                      [&](int64_t first, int64_t last) {
                          scan_of<std::remove_pointer_t<decltype(type)>>(arguments, first, last);
                      });
    });
}

}  // namespace slurmrl::cpu
