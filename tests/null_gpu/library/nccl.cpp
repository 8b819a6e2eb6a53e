// NCCL as rank 0 of any number of ranks in one process. Small messages are what they would be if all
// ranks sent the same; sums are those of this rank alone. A small message that is received from one
// rank is the last one of its size that this rank sent, such as shapes between pipeline stages.
#include <nccl.h>

#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "device.h"

struct ncclComm {
    int ranks, rank;
};

namespace {

size_t element_bytes(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8: return 1;
        case ncclFloat16:
        case ncclBfloat16: return 2;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32: return 4;
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64: return 8;
        default: return 1;  // 8-bit floats
    }
}

constexpr size_t kSmallBytes = 64 << 10;

std::mutex sent_lock;
std::map<size_t, std::vector<char>> sent;  // the last small message of each size

// Counts a message of this rank, and copies a small one to where it is received.
ncclResult_t exchange(const void *from, void *to, size_t elements, ncclDataType_t type) {
    const size_t bytes = elements * element_bytes(type);
    null_gpu::count(collectives);
    null_gpu::count(collective_bytes, long(bytes));
    if (to && from && to != from && bytes <= kSmallBytes) memmove(to, from, bytes);
    return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    *id = {};
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *communicator, int ranks, ncclUniqueId, int rank) {
    null_gpu::count(communicators);
    *communicator = new ncclComm{ranks, rank};
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *communicator, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *) {
    return ncclCommInitRank(communicator, ranks, id, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *communicator, int ranks, int rank, int,
                                      ncclUniqueId *, ncclConfig_t *) {
    return ncclCommInitRank(communicator, ranks, {}, rank);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int, int, ncclComm_t *communicator,
                           ncclConfig_t *) {
    return ncclCommInitRank(communicator, parent->ranks, {}, parent->rank);
}

ncclResult_t ncclCommCount(const ncclComm_t communicator, int *ranks) {
    *ranks = communicator->ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int *rank) {
    *rank = communicator->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t, int *device) {
    *device = 0;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t) { return "an error of the null GPU"; }
const char *ncclGetLastError(ncclComm_t) { return "an error of the null GPU"; }

ncclResult_t ncclCommRegister(const ncclComm_t, void *, size_t, void **handle) {
    *handle = null_gpu::handle();
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t elements, ncclDataType_t type,
                           ncclRedOp_t, ncclComm_t, cudaStream_t) {
    return exchange(from, to, elements, type);
}

ncclResult_t ncclReduce(const void *from, void *to, size_t elements, ncclDataType_t type,
                        ncclRedOp_t, int, ncclComm_t, cudaStream_t) {
    return exchange(from, to, elements, type);
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t elements, ncclDataType_t type, int,
                           ncclComm_t, cudaStream_t) {
    return exchange(from, to, elements, type);
}

ncclResult_t ncclBcast(void *, size_t elements, ncclDataType_t type, int, ncclComm_t,
                       cudaStream_t) {
    return exchange(nullptr, nullptr, elements, type);
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t elements, ncclDataType_t type,
                           ncclComm_t communicator, cudaStream_t) {
    exchange(nullptr, nullptr, elements, type);
    const size_t bytes = elements * element_bytes(type);
    if (bytes * communicator->ranks <= kSmallBytes)
        for (int rank = 0; rank < communicator->ranks; rank++)
            memmove(static_cast<char *>(to) + rank * bytes, from, bytes);
    return ncclSuccess;
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t elements, ncclDataType_t type,
                               ncclRedOp_t, ncclComm_t communicator, cudaStream_t) {
    const size_t bytes = elements * element_bytes(type);
    const char *own = static_cast<const char *>(from) + communicator->rank * bytes;
    exchange(own, to, elements, type);
    null_gpu::count(collective_bytes, long(bytes) * (communicator->ranks - 1));
    return ncclSuccess;
}

ncclResult_t ncclAlltoAll(const void *from, void *to, size_t elements, ncclDataType_t type,
                          ncclComm_t communicator, cudaStream_t) {
    const size_t bytes = elements * element_bytes(type);
    const char *own = static_cast<const char *>(from) + communicator->rank * bytes;
    for (int rank = 0; rank < communicator->ranks; rank++)
        exchange(own, static_cast<char *>(to) + rank * bytes, elements, type);
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *from, size_t elements, ncclDataType_t type, int, ncclComm_t,
                      cudaStream_t) {
    const size_t bytes = elements * element_bytes(type);
    if (bytes && bytes <= kSmallBytes) {
        const std::lock_guard<std::mutex> guard(sent_lock);
        const char *first = static_cast<const char *>(from);
        sent[bytes].assign(first, first + bytes);
    }
    return exchange(nullptr, nullptr, elements, type);
}

ncclResult_t ncclRecv(void *to, size_t elements, ncclDataType_t type, int, ncclComm_t,
                      cudaStream_t) {
    const size_t bytes = elements * element_bytes(type);
    {
        const std::lock_guard<std::mutex> guard(sent_lock);
        const auto message = sent.find(bytes);
        if (message != sent.end()) memmove(to, message->second.data(), bytes);
    }
    return exchange(nullptr, nullptr, elements, type);
}

}  // extern "C"
