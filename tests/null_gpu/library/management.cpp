// libnvidia-ml.so.1, as far as torch asks it which device there is.
#include <cstring>

#include "device.h"

extern "C" {

int nvmlInit_v2() {
    null_gpu::count(initializations);
    return 0;
}

int nvmlInit() { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }
int nvmlShutdown() { return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned, void **device) {
    *device = null_gpu::handle();
    return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *, void **device) {
    *device = null_gpu::handle();
    return 0;
}

int nvmlDeviceGetUUID(void *, char *text, unsigned bytes) {
    strncpy(text, "GPU-00000000-0000-0000-0000-000000000000", bytes);
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses(void *, unsigned *count, void *) {
    *count = 0;
    return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return 0;
}

// Leaves the state as it is: no fabric.
int nvmlDeviceGetGpuFabricInfoV(void *, void *) { return 0; }

constexpr int kNotSupported = 3;
int nvmlDeviceGetNvLinkRemoteDeviceType(void *, unsigned, int *) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *, unsigned, void *) { return kNotSupported; }

}  // extern "C"
