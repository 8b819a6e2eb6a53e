// Checks of the operators without torch. Every buffer has exactly the necessary size, so that
// sanitizers detect an access to one element too many. Results are compared with plain loops. Each
// check gets a `Run` with functions gae, scan, move and blend, which take the arguments of those
// names.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "../arguments.h"
#include "../cpu/numbers.h"

namespace slurmrl::tests {

inline void expect(bool holds, const char* what, int64_t place) {
    if (holds) return;
    std::fprintf(stderr, "%s: wrong at %lld\n", what, static_cast<long long>(place));
    std::exit(1);
}

inline bool close(double found, double wanted) {
    return std::abs(found - wanted) <= 1e-3 * (1.0 + std::abs(wanted));
}

template <typename T>
constexpr Dtype dtype_of = std::is_same_v<T, float>          ? Dtype::float32
                           : std::is_same_v<T, double>        ? Dtype::float64
                           : std::is_same_v<T, cpu::bfloat16> ? Dtype::bfloat16
                                                              : Dtype::float16;

template <typename T>
std::vector<T> numbers(int64_t count, std::mt19937& random) {
    std::uniform_real_distribution<float> draw(-1.0F, 1.0F);
    std::vector<T> made;
    for (int64_t i = 0; i < count; ++i) made.push_back(static_cast<T>(draw(random)));
    return made;
}

template <typename T>
double read(const std::vector<T>& from, int64_t place) {
    return static_cast<double>(static_cast<cpu::Wide<T>>(from[static_cast<size_t>(place)]));
}

template <typename Index>
std::vector<Index> row_offsets(const std::vector<int64_t>& lengths) {
    std::vector<Index> cu{0};
    for (const int64_t length : lengths) cu.push_back(static_cast<Index>(cu.back() + length));
    return cu;
}

template <typename T, typename Index, typename Run>
void check_gae(const std::vector<int64_t>& lengths, const Run& run, bool aligned,
               std::mt19937& random) {
    const auto cu = row_offsets<Index>(lengths);
    const int64_t tokens = cu.back(), sequences = static_cast<int64_t>(lengths.size());
    const double gamma = 0.99, lam = 0.95;
    const auto rewards = numbers<T>(tokens, random);
    const auto values = numbers<T>(aligned ? tokens : tokens + sequences, random);
    const auto ends = numbers<T>(sequences, random);
    const std::unique_ptr<bool[]> truncated(new bool[static_cast<size_t>(sequences)]);
    for (int64_t s = 0; s < sequences; ++s) truncated[static_cast<size_t>(s)] = s % 2 == 0;
    std::vector<cpu::Wide<T>> advantages(static_cast<size_t>(tokens)), returns(advantages);
    run.gae({rewards.data(), values.data(), aligned ? ends.data() : nullptr, truncated.get(),
              {cu.data(), sizeof(Index) == 8}, advantages.data(), returns.data(), tokens,
              sequences, gamma, lam, dtype_of<T>});
    for (int64_t s = 0; s < sequences; ++s) {
        const int64_t begin = cu[static_cast<size_t>(s)], end = begin + lengths[static_cast<size_t>(s)];
        const int64_t shift = aligned ? 0 : s;
        double behind = 0.0, carry = 0.0;
        if (truncated[static_cast<size_t>(s)]) {
            behind = aligned ? read(ends, s) : read(values, end + shift);
        }
        for (int64_t t = end - 1; t >= begin; --t) {
            const double value = read(values, t + shift);
            carry = read(rewards, t) + gamma * behind - value + gamma * lam * carry;
            expect(close(read(advantages, t), carry), "advantages", t);
            expect(close(read(returns, t), carry + value), "returns", t);
            behind = value;
        }
    }
}

template <typename T, typename Run>
void check_scan(const std::vector<int64_t>& lengths, const Run& run, bool decays, bool tails,
                std::mt19937& random) {
    const auto cu = row_offsets<int32_t>(lengths);
    const int64_t tokens = cu.back(), sequences = static_cast<int64_t>(lengths.size());
    const auto x = numbers<T>(tokens, random), decay = numbers<T>(tokens, random);
    const auto tail = numbers<T>(sequences, random);
    std::vector<cpu::Wide<T>> y(static_cast<size_t>(tokens));
    run.scan({x.data(), decays ? decay.data() : nullptr, tails ? tail.data() : nullptr,
               {cu.data(), false}, y.data(), tokens, sequences, 0.9, dtype_of<T>});
    for (int64_t s = 0; s < sequences; ++s) {
        double carry = tails ? read(tail, s) : 0.0;
        for (int64_t t = cu[static_cast<size_t>(s) + 1] - 1; t >= cu[static_cast<size_t>(s)]; --t) {
            carry = read(x, t) + 0.9 * (decays ? read(decay, t) : 1.0) * carry;
            expect(close(read(y, t), carry), "scan", t);
        }
    }
}

template <typename T, typename Run>
void check_copies(const std::vector<int64_t>& lengths, const Run& run, std::mt19937& random) {
    const auto offsets = row_offsets<int64_t>(lengths);
    const int64_t total = offsets.back();
    std::vector<int64_t> starts;
    int64_t at = 1;
    for (const int64_t length : lengths) {
        starts.push_back(at);
        at += length + 1;
    }
    const Intervals intervals{starts.data(), offsets.data(),
                              static_cast<int64_t>(lengths.size()), total};
    const auto flat = numbers<T>(at, random);
    std::vector<T> packed(static_cast<size_t>(total)), back(static_cast<size_t>(at));
    run.move({flat.data(), packed.data(), intervals, sizeof(T), true});
    run.move({packed.data(), back.data(), intervals, sizeof(T), false});
    auto mixed = numbers<double>(at, random);
    const auto before = mixed;
    run.blend({packed.data(), mixed.data(), intervals, dtype_of<T>, Dtype::float64, 0.25, false});
    for (size_t i = 0; i < lengths.size(); ++i) {
        for (int64_t k = starts[i]; k < starts[i] + lengths[i]; ++k) {
            expect(read(back, k) == read(flat, k), "gather and scatter", k);
            expect(close(read(mixed, k), 0.25 * read(flat, k) + 0.75 * read(before, k)), "mix", k);
        }
    }
}

template <typename T, typename Run>
void check_all(const std::vector<int64_t>& lengths, const Run& run, std::mt19937& random) {
    for (const bool one : {false, true}) {
        check_gae<T, int32_t>(lengths, run, one, random);
        check_gae<T, int64_t>(lengths, run, one, random);
        for (const bool other : {false, true}) check_scan<T>(lengths, run, one, other, random);
    }
    check_copies<T>(lengths, run, random);
}

template <typename Run>
void check_all_types(const std::vector<int64_t>& lengths, const Run& run, std::mt19937& random) {
    check_all<float>(lengths, run, random);
    check_all<double>(lengths, run, random);
    check_all<cpu::bfloat16>(lengths, run, random);
    check_all<cpu::float16>(lengths, run, random);
}

}  // namespace slurmrl::tests
