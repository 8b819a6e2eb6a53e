// The part of CUDA that our kernels need, on a CPU, for tests. A block is an operating-system
// thread. Its threads are fibers, which yield at every barrier, shuffle and wait. Several blocks
// run at the same time and begin in a shuffled order. The test that compiles this file rewrites the
// launch syntax.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static thread_local

using std::max;
using std::min;

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
struct cudaFuncAttributes {};

struct Index3 {
    unsigned x;
};
inline thread_local Index3 threadIdx, blockIdx;
inline thread_local Index3 gridDim;

namespace emulated {

constexpr unsigned warp = 32;
constexpr size_t stack_bytes = 1 << 16;
constexpr unsigned resident_blocks = 3;

// Threads that wait for each other.
struct Barrier {
    unsigned size = 0, arrived = 0, generation = 0;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[stack_bytes]};
    bool done = false;
    unsigned exchanges = 0;
};

struct Warp {
    Barrier barrier;
    alignas(16) char slots[2][warp][16];  // of this exchange and of the previous exchange
};

struct Block {
    ucontext_t scheduler;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier barrier;
    std::function<void()> body;
};

inline thread_local Block* block = nullptr;

inline void give_way() {
    Fiber& fiber = block->fibers[threadIdx.x];
    swapcontext(&fiber.context, &block->scheduler);
}

inline void wait_at(Barrier& barrier) {
    const unsigned generation = barrier.generation;
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (barrier.generation == generation) give_way();
}

// Each lane passes a value to its warp and reads the value of another lane.
template <typename T, typename Read>
auto exchange(T value, Read read) {
    static_assert(sizeof(T) <= 16);
    Warp& own = block->warps[threadIdx.x / warp];
    auto& slots = own.slots[block->fibers[threadIdx.x].exchanges++ % 2];
    std::memcpy(slots[threadIdx.x % warp], &value, sizeof(T));
    wait_at(own.barrier);
    return read([&](unsigned lane) {
        T found;
        std::memcpy(&found, slots[lane], sizeof(T));
        return found;
    });
}

inline void enter() {
    block->body();
    block->fibers[threadIdx.x].done = true;
}

inline void run_block(unsigned number, unsigned blocks, unsigned threads,
                      const std::function<void()>& body) {
    Block own{{}, std::vector<Fiber>(threads), std::vector<Warp>(threads / warp), {threads}, body};
    block = &own;
    blockIdx.x = number;
    gridDim.x = blocks;
    for (Warp& one : own.warps) one.barrier.size = warp;
    for (Fiber& fiber : own.fibers) {
        getcontext(&fiber.context);
        fiber.context.uc_stack = {fiber.stack.get(), 0, stack_bytes};
        fiber.context.uc_link = &own.scheduler;
        makecontext(&fiber.context, enter, 0);
    }
    for (unsigned left = threads; left > 0;) {
        left = 0;
        for (unsigned i = 0; i < threads; ++i) {
            if (own.fibers[i].done) continue;
            threadIdx.x = i;
            swapcontext(&own.scheduler, &own.fibers[i].context);
            left += own.fibers[i].done ? 0 : 1;
        }
        std::this_thread::yield();
    }
}

// Replaces <<<blocks, threads, shared bytes, stream>>>.
struct Grid {
    unsigned blocks, threads;
    Grid(unsigned blocks, unsigned threads, size_t, cudaStream_t)
        : blocks(blocks), threads(threads) {}

    template <typename Kernel, typename... Arguments>
    void run(Kernel kernel, Arguments... arguments) const {
        std::vector<unsigned> order(blocks);
        std::iota(order.begin(), order.end(), 0U);
        std::shuffle(order.begin(), order.end(), std::mt19937(blocks));
        std::atomic<unsigned> next{0};
        std::vector<std::thread> residents;
        for (unsigned i = 0; i < std::min(resident_blocks, blocks); ++i) {
            residents.emplace_back([&] {
                for (unsigned place = next++; place < blocks; place = next++) {
                    run_block(order[place], blocks, threads, [&] { kernel(arguments...); });
                }
            });
        }
        for (std::thread& resident : residents) resident.join();
    }
};

}  // namespace emulated

inline void __syncthreads() { emulated::wait_at(emulated::block->barrier); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned) { emulated::give_way(); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned distance) {
    const unsigned lane = threadIdx.x % emulated::warp, other = lane + distance;
    return emulated::exchange(
        value, [&](auto of) { return of(other < emulated::warp ? other : lane); });
}

template <typename T>
T __shfl_sync(unsigned, T value, unsigned lane) {
    return emulated::exchange(value, [&](auto of) { return of(lane); });
}

inline unsigned __ballot_sync(unsigned, bool holds) {
    return emulated::exchange(holds, [](auto of) {
        unsigned bits = 0;
        for (unsigned lane = 0; lane < emulated::warp; ++lane) {
            bits |= static_cast<unsigned>(of(lane)) << lane;
        }
        return bits;
    });
}

inline unsigned atomicAdd(unsigned* to, unsigned value) {
    return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}

inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
    std::memset(to, value, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
    return cudaSuccess;
}
