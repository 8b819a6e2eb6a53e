// What the replaced functions share: counters, the hook at host waits, and where memory lies.
#pragma once
#include <cstddef>
#include <cstdint>

// A counter and what it counts. Bytes have counters of their own.
#define NULL_GPU_COUNTERS(COUNTER)                                                       \
    COUNTER(launches)        /* kernels, except products */                              \
    COUNTER(products)        /* matrix products of cuBLAS and cuBLASLt */                \
    COUNTER(waits)           /* the host waits for a stream, an event or the device */   \
    COUNTER(to_device)       /* copies by direction */                                   \
    COUNTER(to_device_bytes)                                                             \
    COUNTER(to_host)                                                                     \
    COUNTER(to_host_bytes)                                                               \
    COUNTER(on_device)                                                                   \
    COUNTER(on_device_bytes)                                                             \
    COUNTER(fills)           /* memset */                                                \
    COUNTER(allocations)     /* of device memory by the driver, under torch's allocator */ \
    COUNTER(pinned)          /* allocations and registrations of host memory */          \
    COUNTER(pinned_bytes)    /* held now */                                              \
    COUNTER(events)          /* recorded */                                              \
    COUNTER(stream_waits)    /* a stream waits for an event; the host does not */        \
    COUNTER(communicators)                                                               \
    COUNTER(collectives)                                                                 \
    COUNTER(collective_bytes) /* of this rank's send buffers */                          \
    COUNTER(initializations) /* calls that make CUDA start in this process */

enum Counter {
#define COUNTER(name) name,
    NULL_GPU_COUNTERS(COUNTER)
#undef COUNTER
    COUNTERS
};

namespace null_gpu {

void count(Counter counter, long by = 1);
void host_waits();  // counts it and calls the hook

constexpr int kCapability = 9;  // Hopper
constexpr int kProcessors = 132;
constexpr int kSharedBytes = 232448;

size_t total_bytes();
size_t free_bytes();

enum class Place { host, pinned, device };
Place place_of(const void *address);

// Address space without pages behind it: pages exist once something is copied there.
void *reserve(size_t bytes, Place place);
size_t release(void *address, Place place);  // its bytes; 0 where there is none
void pin(void *address, size_t bytes);     // memory that belongs to the caller

// Charges device memory; false if there is not so much left.
bool charge(long bytes);

// A new handle of anything.
void *handle();

// Copies up to kCopiedBytes; larger copies are only counted. A single number that is copied to the
// host is zero.
constexpr size_t kCopiedBytes = 4 << 20;
void copy(void *to, const void *from, size_t bytes);
void fill(void *to, int value, size_t bytes);

}  // namespace null_gpu
