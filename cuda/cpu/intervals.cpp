// Copies between a packed buffer and intervals of another buffer.

#include <cstring>

#include "loops.h"
#include "numbers.h"
#include "parts.h"

namespace slurmrl::cpu {
namespace {

// The interval that contains a packed element: the last interval that begins at the element or
// before it.
int64_t interval_of(const Intervals& intervals, int64_t element) {
    const int64_t* end = intervals.offsets + intervals.count;
    return std::upper_bound(intervals.offsets, end, element) - intervals.offsets - 1;
}

// Calls function(packed element, scattered element, count) for each run, divided among threads by
// elements, so that threads also share one long interval.
template <typename Function>
void for_runs(const Intervals& intervals, const Pool& pool, Function function) {
    const int64_t parts = number_of_parts(intervals.total, pool);
    for_each_part(parts, pool, [&](int64_t part) {
        int64_t packed = first_of_part(intervals.total, parts, part);
        const int64_t end = first_of_part(intervals.total, parts, part + 1);
        if (packed == end) return;
        for (int64_t i = interval_of(intervals, packed); packed < end; ++i) {
            const int64_t stop = std::min(intervals.offsets[i + 1], end);
            const int64_t scattered = intervals.starts[i] + packed - intervals.offsets[i];
            if (stop > packed) function(packed, scattered, stop - packed);
            packed = stop;
        }
    });
}

template <typename Source, typename Target>
void blend_run(const Source* source, Target* target, int64_t count, double eta) {
    using W = std::conditional_t<
        std::is_same_v<Source, double> || std::is_same_v<Target, double>, double, float>;
    if (eta == 1.0) {
        for (int64_t i = 0; i < count; ++i) {
            target[i] = static_cast<Target>(static_cast<Wide<Target>>(source[i]));
        }
        return;
    }
    const W share = static_cast<W>(eta), rest = static_cast<W>(1.0 - eta);
    for (int64_t i = 0; i < count; ++i) {
        const W mixed = share * static_cast<W>(source[i]) + rest * static_cast<W>(target[i]);
        target[i] = static_cast<Target>(static_cast<Wide<Target>>(mixed));
    }
}

}  // namespace

void move(const Move& m, const Pool& pool) {
    const auto* source = static_cast<const char*>(m.source);
    auto* target = static_cast<char*>(m.target);
    for_runs(m.intervals, pool, [&](int64_t packed, int64_t scattered, int64_t count) {
        const int64_t from = m.gather ? scattered : packed, to = m.gather ? packed : scattered;
        std::memcpy(target + to * m.item_bytes, source + from * m.item_bytes,
                    static_cast<size_t>(count * m.item_bytes));
    });
}

void blend(const Blend& b, const Pool& pool) {
    with_type(b.source_dtype, [&](auto* from_type) {
        with_type(b.target_dtype, [&](auto* to_type) {
            using Source = std::remove_pointer_t<decltype(from_type)>;
            using Target = std::remove_pointer_t<decltype(to_type)>;
            const auto* source = static_cast<const Source*>(b.source);
            auto* target = static_cast<Target*>(b.target);
            for_runs(b.intervals, pool, [&](int64_t packed, int64_t scattered, int64_t count) {
                const int64_t from = b.gather ? scattered : packed;
                const int64_t to = b.gather ? packed : scattered;
                blend_run(source + from, target + to, count, b.eta);
            });
        });
    });
}

}  // namespace slurmrl::cpu
