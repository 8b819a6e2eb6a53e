#include "device.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#define VISIBLE extern "C" __attribute__((visibility("default")))

namespace {

std::atomic<long> counters[COUNTERS];
void (*wait_hook)() = nullptr;

struct Reservation {
    size_t bytes;
    null_gpu::Place place;
    bool ours;  // to be unmapped
};
std::mutex mutex;
std::map<const char *, Reservation> reservations;
size_t used = 0;

}  // namespace

VISIBLE const char *null_gpu_counter_names() {
#define COUNTER(name) #name " "
    return NULL_GPU_COUNTERS(COUNTER);
#undef COUNTER
}
VISIBLE long null_gpu_counter(int index) { return counters[index]; }
VISIBLE void null_gpu_at_waits(void (*hook)()) { wait_hook = hook; }

namespace null_gpu {

void count(Counter counter, long by) { counters[counter] += by; }

void host_waits() {
    count(waits);
    if (wait_hook) wait_hook();
}

size_t total_bytes() {
    static const size_t total = [] {
        const char *gib = getenv("NULL_GPU_GIB");
        return size_t(gib ? atol(gib) : 80) << 30;
    }();
    return total;
}

size_t free_bytes() {
    std::lock_guard<std::mutex> guard(mutex);
    return total_bytes() - used;
}

Place place_of(const void *address) {
    std::lock_guard<std::mutex> guard(mutex);
    auto next = reservations.upper_bound(static_cast<const char *>(address));
    if (next == reservations.begin()) return Place::host;
    auto &[start, held] = *--next;
    return static_cast<const char *>(address) < start + held.bytes ? held.place : Place::host;
}

void *reserve(size_t bytes, Place place) {
    bytes = bytes ? bytes : 1;
    void *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) return nullptr;
    std::lock_guard<std::mutex> guard(mutex);
    reservations[static_cast<char *>(address)] = {bytes, place, true};
    if (place == Place::pinned) count(pinned), count(pinned_bytes, long(bytes));
    return address;
}

size_t release(void *address, Place place) {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = reservations.find(static_cast<char *>(address));
    if (found == reservations.end() || found->second.place != place) return 0;
    const Reservation held = found->second;
    if (place == Place::pinned) count(pinned_bytes, -long(held.bytes));
    if (held.ours) munmap(address, held.bytes);
    reservations.erase(found);
    return held.bytes;
}

void pin(void *address, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex);
    reservations[static_cast<char *>(address)] = {bytes, Place::pinned, false};
    count(pinned), count(pinned_bytes, long(bytes));
}

bool charge(long bytes) {
    std::lock_guard<std::mutex> guard(mutex);
    if (bytes > 0 && used + size_t(bytes) > total_bytes()) return false;
    used += bytes;
    return true;
}

void *handle() {
    static std::atomic<uintptr_t> last{0x1000};
    return reinterpret_cast<void *>(last += 16);
}

void copy(void *to, const void *from, size_t bytes) {
    const bool to_gpu = place_of(to) == Place::device, from_gpu = place_of(from) == Place::device;
    if (to_gpu && from_gpu)
        count(on_device), count(on_device_bytes, long(bytes));
    else if (to_gpu)
        count(to_device), count(to_device_bytes, long(bytes));
    else
        count(to_host), count(to_host_bytes, long(bytes));
    // What C++ code reads for itself are counts that a kernel should have written.
    if (from_gpu && !to_gpu && bytes <= sizeof(long))
        memset(to, 0, bytes);
    else if (bytes <= kCopiedBytes && to != from)
        memmove(to, from, bytes);
}

void fill(void *to, int value, size_t bytes) {
    count(fills);
    if (bytes <= kCopiedBytes) memset(to, value, bytes);
}

}  // namespace null_gpu
