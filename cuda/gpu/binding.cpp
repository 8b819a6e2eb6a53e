// The CUDA operators as torch operators, in torch's stable ABI.
//
// The library compiles and loads with any build of torch, even without CUDA. It needs one function
// of torch's CUDA library, for the current stream, and looks it up at the first call.

#include "../binding.h"

#include <dlfcn.h>

#include "launch.h"

namespace slurmrl::gpu {
namespace {

using CurrentStream = AOTITorchError (*)(int32_t device_index, void** stream);

CurrentStream find_current_stream() {
    const char* name = "aoti_torch_get_current_cuda_stream";
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* found = library == nullptr ? nullptr : dlsym(library, name);
    STD_TORCH_CHECK(found != nullptr, "this torch has no ", name, ": is it a CUDA build?");
    return reinterpret_cast<CurrentStream>(found);
}

// Makes the device of a tensor current until destruction, and stores the current stream of this
// device.
class OnDeviceOf {
public:
    explicit OnDeviceOf(const Tensor& tensor) : guard_(tensor.get_device_index()) {
        static const CurrentStream current_stream = find_current_stream();
        void* stream = nullptr;
        const AOTITorchError error = current_stream(tensor.get_device_index(), &stream);
        STD_TORCH_CHECK(error == 0, "torch does not say which stream is current");
        stream_ = static_cast<cudaStream_t>(stream);
    }
    cudaStream_t stream() const { return stream_; }

private:
    torch::stable::accelerator::DeviceGuard guard_;
    cudaStream_t stream_;
};

void check(cudaError_t error, const char* what) {
    STD_TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

// Memory of torch's allocator, which reuses it in the order of the stream.
Tensor scratch_for(const Tensor& like) {
    const int64_t bytes = scan_scratch_bytes(like.numel(), dtype_of(like));
    return torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
}

void probe_op() { check(probe(), "this device does not run the kernels"); }

void gae_op(Tensor rewards, Tensor values, Tensor cu_seqlens, Tensor truncated,
            std::optional<Tensor> bootstrap_values, Tensor advantages, Tensor returns,
            double gamma, double lam) {
    const OnDeviceOf device(rewards);
    const Tensor scratch = scratch_for(rewards);
    const Gae arguments = gae_arguments(rewards, values, cu_seqlens, truncated, bootstrap_values,
                                        advantages, returns, gamma, lam);
    check(gae(arguments, scratch.mutable_data_ptr(), device.stream()), "gae");
}

void scan_op(Tensor x, Tensor cu_seqlens, std::optional<Tensor> decay, std::optional<Tensor> tail,
             Tensor y, double factor) {
    const OnDeviceOf device(x);
    const Tensor scratch = scratch_for(x);
    const Scan arguments = scan_arguments(x, cu_seqlens, decay, tail, y, factor);
    check(scan(arguments, scratch.mutable_data_ptr(), device.stream()), "scan");
}

void copy_op(Tensor source, Tensor target, Tensor starts, Tensor offsets, int64_t total,
             double eta, bool gather) {
    const OnDeviceOf device(target);
    const Intervals intervals = intervals_of(starts, offsets, total);
    if (moves_only(source, target, eta)) {
        check(move(move_arguments(source, target, intervals, gather), device.stream()), "copy");
    } else {
        const Blend arguments = blend_arguments(source, target, intervals, eta, gather);
        check(blend(arguments, device.stream()), "copy");
    }
}

}  // namespace

STABLE_TORCH_LIBRARY(slurmrl_cuda, m) {
    m.def("probe() -> ()");
    m.def(gae_schema);
    m.def(scan_schema);
    m.def(copy_schema);
}

STABLE_TORCH_LIBRARY_IMPL(slurmrl_cuda, CompositeExplicitAutograd, m) {
    m.impl("probe", TORCH_BOX(&probe_op));
}

STABLE_TORCH_LIBRARY_IMPL(slurmrl_cuda, CUDA, m) {
    m.impl("gae", TORCH_BOX(&gae_op));
    m.impl("scan", TORCH_BOX(&scan_op));
    m.impl("copy", TORCH_BOX(&copy_op));
}

}  // namespace slurmrl::gpu
