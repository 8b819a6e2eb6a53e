// Generalized advantages and discounted sums, in one pass over all tokens of all sequences.
//
// Every token is a map y_t = value_t + factor_t y_{t+1}, with factor 0 at the end of a sequence. A
// packed batch is therefore one chain of maps. A warp processes rows of 128 tokens, four per lane,
// and chains their maps by shuffles. The warps of a tile chain their maps through shared memory,
// and the tiles through global memory (affine.cuh). Each token is read once, and each result is
// written once.

#include "affine.cuh"
#include "launch.h"
#include "numbers.cuh"
#include "segments.cuh"

namespace slurmrl::gpu {
namespace {

constexpr int per_lane = 4;
constexpr int per_row = per_lane * warp_size;
constexpr int warps = 8;

// float64 has fewer rows, because its numbers take twice the registers.
template <typename W>
constexpr int rows = sizeof(W) == 4 ? 4 : 2;
template <typename W>
constexpr int64_t tile_tokens = static_cast<int64_t>(warps) * rows<W> * per_row;

// Places of the four tokens of a lane.
struct Places {
    int64_t sequence[per_lane];
    bool last[per_lane];  // the sequence ends with this token
};

template <typename T, typename W>
__device__ __forceinline__ void load_row(const T* from, int64_t token, int count, bool vectors,
                                         W* to) {
    if (vectors && count == per_lane) {
        const auto loaded = *reinterpret_cast<const Vector<T, per_lane>*>(from + token);
#pragma unroll
        for (int i = 0; i < per_lane; ++i) to[i] = widen<W>(loaded.items[i]);
    } else {
#pragma unroll
        for (int i = 0; i < per_lane; ++i) to[i] = i < count ? widen<W>(from[token + i]) : W(0);
    }
}

template <typename W>
__device__ __forceinline__ void store_row(W* to, int64_t token, int count, const W* from) {
    if (count == per_lane) {  // slurmrl allocates the outputs, so they are aligned
        Vector<W, per_lane> stored;
#pragma unroll
        for (int i = 0; i < per_lane; ++i) stored.items[i] = from[i];
        *reinterpret_cast<Vector<W, per_lane>*>(to + token) = stored;
    } else {
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            if (i < count) to[token + i] = from[i];
        }
    }
}

// Maps with delta_t and gamma lam. The values before each step are kept for the returns.
template <typename T>
struct GaeProblem {
    using W = Wide<T>;
    const T* rewards;
    const T* values;
    const T* bootstrap_values;
    const bool* truncated;
    W* advantages;
    W* returns;
    W gamma;
    W factor;
    bool vectors;

    __device__ __forceinline__ W value(int64_t token, int64_t sequence) const {
        return widen<W>(values[token + (bootstrap_values == nullptr ? sequence : 0)]);
    }
    __device__ __forceinline__ W behind_end(int64_t token, int64_t sequence) const {
        if (!truncated[sequence]) return W(0);
        if (bootstrap_values != nullptr) return widen<W>(bootstrap_values[sequence]);
        return value(token + 1, sequence);
    }
    __device__ __forceinline__ void load(int64_t token, int count, const Places& places,
                                         Affine<W>* maps, W* kept) const {
        W reward[per_lane];
        load_row(rewards, token, count, vectors, reward);
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            kept[i] = i < count ? value(token + i, places.sequence[i]) : W(0);
        }
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            if (i >= count) {
                maps[i] = Affine<W>::identity();
                continue;
            }
            W behind;
            if (places.last[i]) behind = behind_end(token + i, places.sequence[i]);
            else if (i + 1 < per_lane) behind = kept[i + 1];
            else behind = value(token + i + 1, places.sequence[i]);
            maps[i] = {places.last[i] ? W(0) : factor, reward[i] + gamma * behind - kept[i]};
        }
    }
    __device__ __forceinline__ void store(int64_t token, int count, const W* y,
                                          const W* kept) const {
        W sums[per_lane];
#pragma unroll
        for (int i = 0; i < per_lane; ++i) sums[i] = y[i] + kept[i];
        store_row(advantages, token, count, y);
        store_row(returns, token, count, sums);
    }
};

// x_t and factor decay_t.
template <typename T>
struct ScanProblem {
    using W = Wide<T>;
    const T* x;
    const T* decay;
    const T* tail;
    W* y;
    W factor;
    bool vectors;

    __device__ __forceinline__ void load(int64_t token, int count, const Places& places,
                                         Affine<W>* maps, W*) const {
        W value[per_lane], share[per_lane];
        load_row(x, token, count, vectors, value);
        if (decay != nullptr) load_row(decay, token, count, vectors, share);
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            if (i >= count) {
                maps[i] = Affine<W>::identity();
                continue;
            }
            maps[i] = {decay == nullptr ? factor : factor * share[i], value[i]};
            if (places.last[i]) {
                const W behind = tail == nullptr ? W(0) : widen<W>(tail[places.sequence[i]]);
                maps[i] = {W(0), maps[i](behind)};
            }
        }
    }
    __device__ __forceinline__ void store(int64_t token, int count, const W* sums,
                                          const W*) const {
        store_row(y, token, count, sums);
    }
};

template <typename Index>
__device__ __forceinline__ Places locate(const Segments<Index>& sequences, int64_t tokens,
                                         int64_t token, int count, int64_t low, int64_t high) {
    Places places;
    int64_t sequence = count > 0 ? sequences.find(token, low, high) : low;
    int64_t end = sequences.begins[sequence + 1];
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
        if (i < count && token + i >= end) {
            // The next sequence begins here unless it is empty.
            sequence = min(sequence + 1, high);
            end = sequences.begins[sequence + 1];
            if (token + i >= end) {
                sequence = sequences.find(token + i, sequence, high);
                end = sequences.begins[sequence + 1];
            }
        }
        places.sequence[i] = sequence;
        // Offsets may be wrong, so never read after the last token.
        places.last[i] = token + i + 1 == end || token + i + 1 == tokens;
    }
    return places;
}

template <typename Problem, typename Index>
__global__ void __launch_bounds__(warps * warp_size)
    scan_kernel(const Problem problem, const Segments<Index> sequences, const int64_t tokens,
                const Tiles<typename Problem::W> tiles) {
    using W = typename Problem::W;
    using Map = Affine<W>;
    constexpr int n = rows<W>;
    __shared__ unsigned shared_ticket;
    __shared__ Map warp_maps[warps];
    __shared__ W shared_carry;
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    // Tiles begin in the order of their tickets, so the tiles for which a tile waits have begun
    // already.
    if (threadIdx.x == 0) shared_ticket = atomicAdd(tiles.ticket, 1u);
    __syncthreads();
    const int64_t tile = shared_ticket;
    const int64_t first = (gridDim.x - 1 - tile) * tile_tokens<W> + warp * n * per_row;
    const int64_t valid = max(int64_t(0), min(int64_t(n) * per_row, tokens - first));

    int64_t low = 0, high = 0;
    if (valid > 0) {
        low = sequences.find_by_warp(first, 0, lane);
        high = sequences.find_by_warp(first + valid - 1, low, lane);
    }
    Map maps[n][per_lane];
    W kept[n][per_lane];
    int counts[n];
#pragma unroll
    for (int row = 0; row < n; ++row) {
        const int64_t begin = row * per_row + lane * per_lane;
        counts[row] = static_cast<int>(max(int64_t(0), min(int64_t(per_lane), valid - begin)));
        if (counts[row] > 0) {
            const Places places =
                locate(sequences, tokens, first + begin, counts[row], low, high);
            problem.load(first + begin, counts[row], places, maps[row], kept[row]);
        } else {
#pragma unroll
            for (int i = 0; i < per_lane; ++i) maps[row][i] = Map::identity();
        }
    }

    // Computes y after the four tokens of each lane, as a function of y after the tokens of the
    // warp.
    Map behind_lane[n];
    Map behind_row = Map::identity();
#pragma unroll
    for (int row = n - 1; row >= 0; --row) {
#pragma unroll
        for (int i = per_lane - 2; i >= 0; --i) maps[row][i] = maps[row][i].after(maps[row][i + 1]);
        const Map chained = chain_lanes(maps[row][0], lane);
        Map others = from_lane_behind(chained, 1);
        if (lane == warp_size - 1) others = Map::identity();
        behind_lane[row] = others.after(behind_row);
        const Map whole = {__shfl_sync(all_lanes, chained.factor, 0),
                           __shfl_sync(all_lanes, chained.value, 0)};
        behind_row = whole.after(behind_row);
    }
    if (lane == 0) warp_maps[warp] = behind_row;
    __syncthreads();

    Map behind_warp = Map::identity();
    for (int other = warps - 1; other > warp; --other) {
        behind_warp = warp_maps[other].after(behind_warp);
    }
    if (warp == 0) {
        const W carry = tiles.carry_into(tile, warp_maps[0].after(behind_warp), lane);
        if (lane == 0) shared_carry = carry;
    }
    __syncthreads();
    const W y_behind_warp = behind_warp(shared_carry);
#pragma unroll
    for (int row = 0; row < n; ++row) {
        if (counts[row] == 0) continue;
        const W y_behind = behind_lane[row](y_behind_warp);
        W y[per_lane];
#pragma unroll
        for (int i = 0; i < per_lane; ++i) y[i] = maps[row][i](y_behind);
        problem.store(first + row * per_row + lane * per_lane, counts[row], y, kept[row]);
    }
}

template <typename W>
int64_t tiles_of(int64_t tokens) {
    return (tokens + tile_tokens<W> - 1) / tile_tokens<W>;
}

template <typename Problem, typename Index>
cudaError_t launch(const Problem& problem, const Segments<Index>& sequences, int64_t tokens,
                   void* scratch, cudaStream_t stream) {
    using W = typename Problem::W;
    const int64_t tiles = tiles_of<W>(tokens);
    const cudaError_t error =
        cudaMemsetAsync(scratch, 0, static_cast<size_t>(Tiles<W>::flag_bytes(tiles)), stream);
    if (error != cudaSuccess) return error;
    scan_kernel<<<static_cast<unsigned>(tiles), warps * warp_size, 0, stream>>>(
        problem, sequences, tokens, Tiles<W>::in(scratch, tiles));
    return cudaGetLastError();
}

template <typename Problem>
cudaError_t launch(const Problem& problem, const Offsets& offsets, int64_t sequences,
                   int64_t tokens, void* scratch, cudaStream_t stream) {
    if (tokens == 0) return cudaSuccess;
    if (offsets.wide) {
        const auto* cu = static_cast<const int64_t*>(offsets.data);
        return launch(problem, Segments<int64_t>{cu, sequences}, tokens, scratch, stream);
    }
    const auto* cu = static_cast<const int32_t*>(offsets.data);
    return launch(problem, Segments<int32_t>{cu, sequences}, tokens, scratch, stream);
}

}  // namespace

int64_t scan_scratch_bytes(int64_t tokens, Dtype dtype) {
    if (dtype == Dtype::float64) return Tiles<double>::bytes(tiles_of<double>(tokens));
    return Tiles<float>::bytes(tiles_of<float>(tokens));
}

cudaError_t probe() {
    cudaFuncAttributes found;
    return cudaFuncGetAttributes(&found, scan_kernel<ScanProblem<float>, int32_t>);
}

cudaError_t gae(const Gae& g, void* scratch, cudaStream_t stream) {
    return with_type(g.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        using W = Wide<T>;
        const GaeProblem<T> problem{static_cast<const T*>(g.rewards),
                                    static_cast<const T*>(g.values),
                                    static_cast<const T*>(g.bootstrap_values),
                                    g.truncated,
                                    static_cast<W*>(g.advantages),
                                    static_cast<W*>(g.returns),
                                    static_cast<W>(g.gamma),
                                    static_cast<W>(g.gamma * g.lam),
                                    aligned<Vector<T, per_lane>>(g.rewards)};
        return launch(problem, g.cu_seqlens, g.sequences, g.tokens, scratch, stream);
    });
}

cudaError_t scan(const Scan& s, void* scratch, cudaStream_t stream) {
    return with_type(s.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        using Row = Vector<T, per_lane>;
        const ScanProblem<T> problem{static_cast<const T*>(s.x),
                                     static_cast<const T*>(s.decay),
                                     static_cast<const T*>(s.tail),
                                     static_cast<Wide<T>*>(s.y),
                                     static_cast<Wide<T>>(s.factor),
                                     aligned<Row>(s.x) && aligned<Row>(s.decay)};
        return launch(problem, s.cu_seqlens, s.sequences, s.tokens, scratch, stream);
    });
}

}  // namespace slurmrl::gpu
