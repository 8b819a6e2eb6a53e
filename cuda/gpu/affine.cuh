// Maps y -> value + factor y, and their composition over the threads of a warp and the tiles of a
// grid.
#pragma once

#include <cstdint>

namespace slurmrl::gpu {

constexpr int warp_size = 32;
constexpr unsigned all_lanes = 0xffffffffu;

template <typename W>
struct Affine {
    W factor;
    W value;

    static __device__ __forceinline__ Affine identity() { return {W(1), W(0)}; }

    // With factor 0 the result does not depend on y, even if y is infinite or NaN.
    __device__ __forceinline__ W operator()(W y) const {
        return factor == W(0) ? value : value + factor * y;
    }
    // Returns the composition that applies `inner` first.
    __device__ __forceinline__ Affine after(const Affine& inner) const {
        return {factor * inner.factor, (*this)(inner.value)};
    }
};

template <typename W>
__device__ __forceinline__ Affine<W> from_lane_behind(const Affine<W>& map, int distance) {
    return {__shfl_down_sync(all_lanes, map.factor, distance),
            __shfl_down_sync(all_lanes, map.value, distance)};
}

// Each lane gets the composition of its own map with the maps of all lanes with higher numbers.
template <typename W>
__device__ __forceinline__ Affine<W> chain_lanes(Affine<W> map, int lane) {
#pragma unroll
    for (int distance = 1; distance < warp_size; distance *= 2) {
        const Affine<W> behind = from_lane_behind(map, distance);
        if (lane + distance < warp_size) map = map.after(behind);
    }
    return map;
}

// Data that tiles publish for later tiles. Tiles have numbers in the order in which they begin,
// from the last tokens to the first. They form groups of 32. A tile reads the maps of all earlier
// tiles of its group, and the final value of the previous group. Each tile therefore combines the
// same numbers in the same order in every run.
template <typename W>
struct Tiles {
    unsigned* ticket;         // number of tiles begun
    unsigned* map_ready;      // [tiles]
    unsigned* result_ready;   // [groups]
    Affine<W>* maps;          // [tiles]
    W* results;               // [groups]

    static constexpr int64_t group = warp_size;

    static int64_t groups(int64_t tiles) { return (tiles + group - 1) / group; }
    static int64_t flag_bytes(int64_t tiles) {
        const int64_t words = 4 + tiles + groups(tiles);
        return (words * 4 + 15) / 16 * 16;
    }
    static int64_t bytes(int64_t tiles) {
        return flag_bytes(tiles) + tiles * static_cast<int64_t>(sizeof(Affine<W>)) +
               groups(tiles) * static_cast<int64_t>(sizeof(W));
    }
    // The flags in the first flag_bytes must be 0 before the kernel begins.
    static Tiles in(void* scratch, int64_t tiles) {
        auto* words = static_cast<unsigned*>(scratch);
        auto* maps =
            reinterpret_cast<Affine<W>*>(static_cast<char*>(scratch) + flag_bytes(tiles));
        return {words, words + 4, words + 4 + tiles, maps, reinterpret_cast<W*>(maps + tiles)};
    }

    static __device__ __forceinline__ void publish(unsigned* flag) {
        __threadfence();
        *static_cast<volatile unsigned*>(flag) = 1;
    }
    static __device__ __forceinline__ void await(const unsigned* flag) {
        while (*static_cast<const volatile unsigned*>(flag) == 0) __nanosleep(20);
        __threadfence();
    }

    // Called by one whole warp. Publishes the map of this tile, and returns y after the tile in all
    // lanes.
    __device__ W carry_into(int64_t tile, const Affine<W>& own, int lane) const {
        if (lane == 0) {
            maps[tile] = own;
            publish(map_ready + tile);
        }
        const int64_t place = tile % group, number = tile / group;
        Affine<W> map = Affine<W>::identity();
        if (lane < place) {
            const int64_t earlier = tile - 1 - lane;
            await(map_ready + earlier);
            const volatile Affine<W>* shared = maps + earlier;
            map = {shared->factor, shared->value};
        }
        map = chain_lanes(map, lane);
        W carry = map.value;
        if (lane == 0) {
            if (number > 0 && map.factor != W(0)) {
                await(result_ready + number - 1);
                carry = map(*static_cast<const volatile W*>(results + number - 1));
            }
            if (place == group - 1) {
                results[number] = own(carry);
                publish(result_ready + number);
            }
        }
        return __shfl_sync(all_lanes, carry, 0);
    }
};

}  // namespace slurmrl::gpu
