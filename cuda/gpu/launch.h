// The operators on a CUDA device. Everything is put on `stream` and nothing is waited for; what
// comes back is the error of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../arguments.h"

namespace slurmrl::gpu {

// Whether the current device can run them: the driver is new enough, and the library holds code for
// the card.
cudaError_t probe();

// Bytes of scratch memory that `gae` and `scan` need, aligned to 16 bytes.
int64_t scan_scratch_bytes(int64_t tokens, Dtype dtype);

cudaError_t gae(const Gae& arguments, void* scratch, cudaStream_t stream);
cudaError_t scan(const Scan& arguments, void* scratch, cudaStream_t stream);
cudaError_t move(const Move& arguments, cudaStream_t stream);
cudaError_t blend(const Blend& arguments, cudaStream_t stream);

}  // namespace slurmrl::gpu
