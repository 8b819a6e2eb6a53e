// Search for the segment of an element among many adjacent segments.
#pragma once

#include <cstdint>

#include "affine.cuh"

namespace slurmrl::gpu {

template <typename Index>
struct Segments {
    const Index* begins;  // [count + 1], from 0 to the number of elements
    int64_t count;

    // The last segment from `low` on that begins at `element` or before it. A whole warp searches
    // 32 places per round. Segment `low` must also begin at `element` or before it.
    __device__ int64_t find_by_warp(int64_t element, int64_t low, int lane) const {
        int64_t high = count;
        while (high - low > 1) {
            const int64_t step = (high - low + warp_size - 1) / warp_size;
            const int64_t place = low + (lane + 1) * step;
            const bool before = place < high && begins[place] <= element;
            const int found = __popc(__ballot_sync(all_lanes, before));
            high = min(high, low + (found + 1) * step);
            low += found * step;
        }
        return low;
    }

    // The same search by one thread, for a segment up to `high`.
    __device__ __forceinline__ int64_t find(int64_t element, int64_t low, int64_t high) const {
        while (low < high) {
            const int64_t middle = low + (high - low + 1) / 2;
            if (begins[middle] <= element) low = middle;
            else high = middle - 1;
        }
        return low;
    }
};

}  // namespace slurmrl::gpu
