// Copies between a packed buffer and intervals of another buffer, in one launch for any number and
// size of intervals.
//
// Work is divided by packed elements, not by intervals. A block copies a tile of the packed buffer.
// Each thread copies chunks of 16 packed bytes and finds the interval of its chunk among the
// intervals of the tile. Accesses have 16 bytes on each aligned side. Neighboring threads therefore
// access neighboring memory for intervals of any length.

#include "launch.h"
#include "numbers.cuh"
#include "segments.cuh"

namespace slurmrl::gpu {
namespace {

constexpr int threads = 256;
constexpr int chunks_per_thread = 4;
constexpr int64_t tile_chunks = threads * chunks_per_thread;

// 16 bytes that are only copied.
struct alignas(16) Bytes16 {
    uint64_t low, high;
};

// Writes `source` into `target`, or blends both.
template <typename Source, typename Target>
struct Mix {
    using W = std::conditional_t<
        std::is_same_v<Source, double> || std::is_same_v<Target, double>, double, float>;
    static constexpr bool reads_target = true;
    W share, rest;

    __device__ __forceinline__ Target operator()(Source source, Target target) const {
        return narrow<Target>(share * widen<W>(source) + rest * widen<W>(target));
    }
};
template <typename Source, typename Target>
struct Convert {
    static constexpr bool reads_target = false;
    __device__ __forceinline__ Target operator()(Source source, Target) const {
        if constexpr (std::is_same_v<Source, Target>) return source;
        else return narrow<Target>(widen<Wide<Target>>(source));
    }
};

template <int N, typename T>
__device__ __forceinline__ Vector<T, N> load(const T* from) {
    if (aligned<Vector<T, N>>(from)) return *reinterpret_cast<const Vector<T, N>*>(from);
    Vector<T, N> loaded;
#pragma unroll
    for (int i = 0; i < N; ++i) loaded.items[i] = from[i];
    return loaded;
}

template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Vector<T, N>& stored) {
    if (aligned<Vector<T, N>>(to)) {
        *reinterpret_cast<Vector<T, N>*>(to) = stored;
        return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = stored.items[i];
}

// Copies `count` neighboring elements; a whole chunk is copied as a vector.
template <int N, typename Source, typename Target, typename Write>
__device__ __forceinline__ void copy_run(const Source* source, Target* target, int64_t count,
                                         const Write& write) {
    if (count == N) {
        const Vector<Source, N> loaded = load<N>(source);
        Vector<Target, N> stored{};
        if constexpr (Write::reads_target) stored = load<N>(target);
#pragma unroll
        for (int i = 0; i < N; ++i) stored.items[i] = write(loaded.items[i], stored.items[i]);
        return store<N>(target, stored);
    }
    for (int64_t i = 0; i < count; ++i) {
        Target old{};
        if constexpr (Write::reads_target) old = target[i];
        target[i] = write(source[i], old);
    }
}

template <typename Source, typename Target, typename Write>
__global__ void __launch_bounds__(threads)
    copy_kernel(const Source* source, Target* target, const Intervals intervals, const bool gather,
                const Write write) {
    constexpr int small = sizeof(Source) < sizeof(Target) ? sizeof(Source) : sizeof(Target);
    constexpr int n = 16 / small;  // elements of a chunk
    const int64_t tile_begin = blockIdx.x * tile_chunks * n;
    const int64_t tile_end = min(intervals.total, tile_begin + tile_chunks * n);
    const Segments<int64_t> segments{intervals.offsets, intervals.count};
    __shared__ int64_t bounds[2];
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    if (warp < 2) {
        const int64_t element = warp == 0 ? tile_begin : tile_end - 1;
        const int64_t found = segments.find_by_warp(element, 0, lane);
        if (lane == 0) bounds[warp] = found;
    }
    __syncthreads();
#pragma unroll
    for (int chunk = 0; chunk < chunks_per_thread; ++chunk) {
        int64_t packed = tile_begin + (chunk * threads + threadIdx.x) * static_cast<int64_t>(n);
        if (packed >= tile_end) break;
        const int64_t chunk_end = min(packed + n, tile_end);
        int64_t i = segments.find(packed, bounds[0], bounds[1]);
        while (packed < chunk_end) {
            const int64_t stop = min(intervals.offsets[i + 1], chunk_end);
            const int64_t scattered = intervals.starts[i] + packed - intervals.offsets[i];
            copy_run<n>(source + (gather ? scattered : packed),
                        target + (gather ? packed : scattered), stop - packed, write);
            packed = stop;
            ++i;
        }
    }
}

template <typename Source, typename Target, typename Write>
cudaError_t launch(const void* source, void* target, const Intervals& intervals, bool gather,
                   const Write& write, cudaStream_t stream) {
    if (intervals.total == 0) return cudaSuccess;
    constexpr int small = sizeof(Source) < sizeof(Target) ? sizeof(Source) : sizeof(Target);
    const int64_t tile = tile_chunks * (16 / small);
    const auto blocks = static_cast<unsigned>((intervals.total + tile - 1) / tile);
    copy_kernel<<<blocks, threads, 0, stream>>>(static_cast<const Source*>(source),
                                                static_cast<Target*>(target), intervals, gather,
                                                write);
    return cudaGetLastError();
}

template <typename T>
cudaError_t launch_move(const Move& m, cudaStream_t stream) {
    return launch<T, T>(m.source, m.target, m.intervals, m.gather, Convert<T, T>{}, stream);
}

}  // namespace

cudaError_t move(const Move& m, cudaStream_t stream) {
    switch (m.item_bytes) {
        case 1: return launch_move<uint8_t>(m, stream);
        case 2: return launch_move<uint16_t>(m, stream);
        case 4: return launch_move<uint32_t>(m, stream);
        case 8: return launch_move<uint64_t>(m, stream);
        case 16: return launch_move<Bytes16>(m, stream);
        default: return cudaErrorInvalidValue;
    }
}

cudaError_t blend(const Blend& b, cudaStream_t stream) {
    return with_type(b.source_dtype, [&](auto* from_type) {
        return with_type(b.target_dtype, [&](auto* to_type) {
            using Source = std::remove_pointer_t<decltype(from_type)>;
            using Target = std::remove_pointer_t<decltype(to_type)>;
            if (b.eta == 1.0) {
                return launch<Source, Target>(b.source, b.target, b.intervals, b.gather,
                                              Convert<Source, Target>{}, stream);
            }
            using W = typename Mix<Source, Target>::W;
            const Mix<Source, Target> mix{static_cast<W>(b.eta), static_cast<W>(1.0 - b.eta)};
            return launch<Source, Target>(b.source, b.target, b.intervals, b.gather, mix, stream);
        });
    });
}

}  // namespace slurmrl::gpu
