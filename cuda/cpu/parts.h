// Division of work into parts with about equal numbers of elements.
#pragma once

#include <algorithm>
#include <cstdint>

#include "loops.h"

namespace slurmrl::cpu {

// Minimum number of elements for which another thread saves time.
constexpr int64_t elements_per_part = 1 << 15;
// With several parts per thread, threads of different speed finish at about the same time.
constexpr int64_t parts_per_thread = 4;

inline int64_t number_of_parts(int64_t elements, const Pool& pool) {
    const int64_t most = pool.threads == 1 ? 1 : pool.threads * parts_per_thread;
    return std::clamp<int64_t>(elements / elements_per_part, 1, most);
}

// The first element of a part. For part number `parts`, it is `elements`.
inline int64_t first_of_part(int64_t elements, int64_t parts, int64_t part) {
    return elements / parts * part + std::min(part, elements % parts);
}

// Calls function(part) for each part, on the pool's threads.
template <typename Function>
void for_each_part(int64_t parts, const Pool& pool, Function function) {
    if (parts == 1) return function(0);
    pool.run(parts, [](int64_t part, void* f) { (*static_cast<Function*>(f))(part); }, &function);
}

}  // namespace slurmrl::cpu
