// libcuda.so.1, as far as torch and Triton bind it. The functions that do nothing are in nothing.cpp.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "device.h"

using null_gpu::Place;

namespace {
CUcontext const kContext = reinterpret_cast<CUcontext>(16);
}  // namespace

extern "C" {

CUresult cuInit(unsigned) {
    null_gpu::count(initializations);
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char **text) {
    *text = "an error of the null GPU";
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice) {
    strncpy(name, "null GPU", bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = null_gpu::kCapability; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = null_gpu::kProcessors; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
            *value = null_gpu::kSharedBytes;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
            *value = null_gpu::kSharedBytes + 1024;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1980000; break;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 2619000; break;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 5120; break;
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = 1; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice) {
    *context = kContext;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = kContext;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (context) *context = kContext;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

// ---- kernels that are loaded at run time

CUresult cuModuleLoadData(CUmodule *module, const void *) {
    *module = static_cast<CUmodule>(null_gpu::handle());
    return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule *module, const char *) { return cuModuleLoadData(module, nullptr); }

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned, CUjit_option *, void **) {
    return cuModuleLoadData(module, image);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *) {
    *function = static_cast<CUfunction>(null_gpu::handle());
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *, CUjit_option *, void **, unsigned,
                           CUlibraryOption *, void **, unsigned) {
    *library = static_cast<CUlibrary>(null_gpu::handle());
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary, const char *) {
    *kernel = static_cast<CUkernel>(null_gpu::handle());
    return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    *function = reinterpret_cast<CUfunction>(kernel);
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel, CUdevice) {
    return cuFuncGetAttribute(value, attribute, nullptr);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction, int, size_t) {
    *blocks = 8;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction, const CUlaunchConfig *) {
    *clusters = 16;
    return CUDA_SUCCESS;
}

// ---- memory in segments that grow: one reservation of addresses, physical memory charged apart

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *,
                                       CUmemAllocationGranularity_flags) {
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t, CUdeviceptr,
                             unsigned long long) {
    *address = reinterpret_cast<CUdeviceptr>(null_gpu::reserve(bytes, Place::device));
    return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t) {
    null_gpu::release(reinterpret_cast<void *>(address), Place::device);
    return CUDA_SUCCESS;
}

// The handle of physical memory is its size.
CUresult cuMemCreate(CUmemGenericAllocationHandle *memory, size_t bytes,
                     const CUmemAllocationProp *, unsigned long long) {
    null_gpu::count(allocations);
    *memory = bytes;
    return null_gpu::charge(long(bytes)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle memory) {
    null_gpu::charge(-long(memory));
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr, size_t) { return CUDA_SUCCESS; }

CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) {
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    const Place place = null_gpu::place_of(reinterpret_cast<void *>(address));
    if (place == Place::host) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *static_cast<CUdeviceptr *>(value) = address;
    else
        *static_cast<int *>(value) = attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE
                                         ? CU_MEMORYTYPE_DEVICE
                                         : 0;
    return CUDA_SUCCESS;
}

// ---- how others find the functions above

CUresult cuGetProcAddress_v2(const char *name, void **function, int, cuuint64_t,
                             CUdriverProcAddressQueryResult *found) {
    // Names are asked for without the suffix of their version.
    char versioned[256];
    *function = nullptr;
    for (const char *suffix : {"_v2", ""}) {
        snprintf(versioned, sizeof versioned, "%s%s", name, suffix);
        if (!*function) *function = dlsym(RTLD_DEFAULT, versioned);
    }
    if (found)
        *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"
