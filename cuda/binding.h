// Conversion of torch's tensors to arguments of the loops. Only slurmrl/tensors/ops/ calls the
// library. It checks every argument, allocates outputs and passes contiguous tensors.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "arguments.h"

namespace slurmrl {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Dtype dtype_of(const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case ScalarType::Float: return Dtype::float32;
        case ScalarType::Double: return Dtype::float64;
        case ScalarType::BFloat16: return Dtype::bfloat16;
        case ScalarType::Half: return Dtype::float16;
        default: STD_TORCH_CHECK(false, "not a floating-point tensor");
    }
}

inline const void* pointer(const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? tensor->const_data_ptr() : nullptr;
}

inline Offsets offsets_of(const Tensor& cu_seqlens) {
    return {cu_seqlens.const_data_ptr(), cu_seqlens.scalar_type() == ScalarType::Long};
}

inline Gae gae_arguments(const Tensor& rewards, const Tensor& values, const Tensor& cu_seqlens,
                         const Tensor& truncated, const std::optional<Tensor>& bootstrap_values,
                         const Tensor& advantages, const Tensor& returns, double gamma,
                         double lam) {
    return {rewards.const_data_ptr(),
            values.const_data_ptr(),
            pointer(bootstrap_values),
            static_cast<const bool*>(truncated.const_data_ptr()),
            offsets_of(cu_seqlens),
            advantages.mutable_data_ptr(),
            returns.mutable_data_ptr(),
            rewards.numel(),
            truncated.numel(),
            gamma,
            lam,
            dtype_of(rewards)};
}

inline Scan scan_arguments(const Tensor& x, const Tensor& cu_seqlens,
                           const std::optional<Tensor>& decay, const std::optional<Tensor>& tail,
                           const Tensor& y, double factor) {
    return {x.const_data_ptr(),       pointer(decay),
            pointer(tail),            offsets_of(cu_seqlens),
            y.mutable_data_ptr(),     x.numel(),
            cu_seqlens.numel() - 1,   factor,
            dtype_of(x)};
}

inline Intervals intervals_of(const Tensor& starts, const Tensor& offsets, int64_t total) {
    return {static_cast<const int64_t*>(starts.const_data_ptr()),
            static_cast<const int64_t*>(offsets.const_data_ptr()), starts.numel(), total};
}

// Elements that are copied without conversion may have any type, because only their size matters.
inline bool moves_only(const Tensor& source, const Tensor& target, double eta) {
    return eta == 1.0 && source.scalar_type() == target.scalar_type();
}

inline Move move_arguments(const Tensor& source, const Tensor& target,
                           const Intervals& intervals, bool gather) {
    return {source.const_data_ptr(), target.mutable_data_ptr(), intervals,
            static_cast<int64_t>(source.element_size()), gather};
}

inline Blend blend_arguments(const Tensor& source, const Tensor& target,
                             const Intervals& intervals, double eta, bool gather) {
    return {source.const_data_ptr(), target.mutable_data_ptr(), intervals,
            dtype_of(source),        dtype_of(target),          eta,
            gather};
}

constexpr const char* gae_schema =
    "gae(Tensor rewards, Tensor values, Tensor cu_seqlens, Tensor truncated, "
    "Tensor? bootstrap_values, Tensor(a!) advantages, Tensor(b!) returns, float gamma, float lam)"
    " -> ()";
constexpr const char* scan_schema =
    "scan(Tensor x, Tensor cu_seqlens, Tensor? decay, Tensor? tail, Tensor(a!) y, float factor)"
    " -> ()";
constexpr const char* copy_schema =
    "copy(Tensor source, Tensor(a!) target, Tensor starts, Tensor offsets, int total, float eta, "
    "bool gather) -> ()";

}  // namespace slurmrl
