// The operators on a CUDA device. All work is queued on `stream`. Functions return the error of the
// launch without waiting.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../arguments.h"

namespace slurmrl::gpu {

// Returns cudaSuccess if the current device can run the operators: the driver must be new enough,
// and the library must contain code for the GPU.
cudaError_t probe();

// Bytes of scratch memory that `gae` and `scan` need, aligned to 16 bytes.
int64_t scan_scratch_bytes(int64_t tokens, Dtype dtype);

cudaError_t gae(const Gae& arguments, void* scratch, cudaStream_t stream);
cudaError_t scan(const Scan& arguments, void* scratch, cudaStream_t stream);
cudaError_t move(const Move& arguments, cudaStream_t stream);
cudaError_t blend(const Blend& arguments, cudaStream_t stream);

}  // namespace slurmrl::gpu
