// Functions of the CUDA runtime that return something or move memory. The others are in nothing.cpp.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

#include "device.h"

using null_gpu::Place;

extern "C" {

// ---- the device: one, like an H100

cudaError_t cudaGetDeviceCount(int *count) {
    null_gpu::count(initializations);
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int) {
    null_gpu::count(initializations);
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
    *properties = {};
    cudaDeviceProp &p = *properties;
    strcpy(p.name, "null GPU");
    p.totalGlobalMem = null_gpu::total_bytes();
    p.major = null_gpu::kCapability;
    p.multiProcessorCount = null_gpu::kProcessors;
    p.maxThreadsPerMultiProcessor = 2048;
    p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.warpSize = 32;
    p.sharedMemPerBlock = 48 << 10;
    p.sharedMemPerBlockOptin = null_gpu::kSharedBytes;
    p.sharedMemPerMultiprocessor = null_gpu::kSharedBytes + 1024;
    p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
    p.maxThreadsDim[2] = 64;
    p.maxGridSize[0] = 0x7fffffff;
    p.maxGridSize[1] = p.maxGridSize[2] = 65535;
    p.textureAlignment = 512;
    p.l2CacheSize = 50 << 20;
    p.memoryBusWidth = 5120;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount: *value = null_gpu::kProcessors; break;
        case cudaDevAttrComputeCapabilityMajor: *value = null_gpu::kCapability; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = null_gpu::kSharedBytes; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = null_gpu::kSharedBytes + 1024;
            break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
        case cudaDevAttrMaxGridDimY: *value = 65535; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int) {
    snprintf(id, length, "0000:01:00.0");
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

// ---- memory

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *free = null_gpu::free_bytes();
    *total = null_gpu::total_bytes();
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **address, size_t bytes) {
    null_gpu::count(initializations);
    null_gpu::count(allocations);
    *address = nullptr;
    if (!null_gpu::charge(long(bytes))) return cudaErrorMemoryAllocation;
    *address = null_gpu::reserve(bytes, Place::device);
    return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *address) {
    null_gpu::charge(-long(null_gpu::release(address, Place::device)));
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned) {
    *address = null_gpu::reserve(bytes, Place::pinned);
    return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFreeHost(void *address) {
    null_gpu::release(address, Place::pinned);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned) {
    null_gpu::pin(address, bytes);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address) {
    null_gpu::release(address, Place::pinned);
    return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
    *attributes = {};
    void *itself = const_cast<void *>(address);
    switch (null_gpu::place_of(address)) {
        case Place::device:
            attributes->type = cudaMemoryTypeDevice;
            attributes->devicePointer = itself;
            break;
        case Place::pinned:
            attributes->type = cudaMemoryTypeHost;
            attributes->devicePointer = attributes->hostPointer = itself;
            break;
        case Place::host: attributes->type = cudaMemoryTypeUnregistered;
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
    null_gpu::copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    null_gpu::copy(to, from, bytes);
    null_gpu::host_waits();
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) {
    null_gpu::fill(to, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    null_gpu::fill(to, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *) {
    static void *symbols = null_gpu::reserve(1 << 20, Place::device);
    *address = symbols;
    return cudaSuccess;
}

// ---- streams and events: everything is done at once

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
    *stream = static_cast<cudaStream_t>(null_gpu::handle());
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *,
                                     const cudaGraphNode_t **, const cudaGraphEdgeData **,
                                     size_t *dependencies) {
    if (status) *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (dependencies) *dependencies = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) {
    null_gpu::host_waits();
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    null_gpu::host_waits();
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t) {
    null_gpu::host_waits();
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = static_cast<cudaEvent_t>(null_gpu::handle());
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 1;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

// ---- kernels

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 64;
    attributes->binaryVersion = attributes->ptxVersion = 10 * null_gpu::kCapability;
    attributes->maxDynamicSharedSizeBytes = null_gpu::kSharedBytes;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int,
                                                                   size_t, unsigned) {
    *blocks = 8;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t) {
    *blocks = 8;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
    const bool there = cuGetProcAddress(name, function, 0, 0, nullptr) == CUDA_SUCCESS;
    if (found)
        *found = there ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function));
    return cudaSuccess;
}

}  // extern "C"
