// The CPU half as torch operators, in torch's stable ABI.

#include "../binding.h"
#include "loops.h"

namespace slurmrl::cpu {
namespace {

Pool torch_pool() {
    const auto run = [](int64_t parts, Body body, void* context) {
        torch::stable::parallel_for(0, parts, 1, [=](int64_t begin, int64_t end) {
            for (int64_t part = begin; part < end; ++part) body(part, context);
        });
    };
    return {run, static_cast<int64_t>(torch::stable::get_num_threads())};
}

void gae_op(Tensor rewards, Tensor values, Tensor cu_seqlens, Tensor truncated,
            std::optional<Tensor> bootstrap_values, Tensor advantages, Tensor returns,
            double gamma, double lam) {
    gae(gae_arguments(rewards, values, cu_seqlens, truncated, bootstrap_values, advantages,
                      returns, gamma, lam),
        torch_pool());
}

void scan_op(Tensor x, Tensor cu_seqlens, std::optional<Tensor> decay, std::optional<Tensor> tail,
             Tensor y, double factor) {
    scan(scan_arguments(x, cu_seqlens, decay, tail, y, factor), torch_pool());
}

void copy_op(Tensor source, Tensor target, Tensor starts, Tensor offsets, int64_t total,
             double eta, bool gather) {
    const Intervals intervals = intervals_of(starts, offsets, total);
    if (moves_only(source, target, eta)) {
        move(move_arguments(source, target, intervals, gather), torch_pool());
    } else {
        blend(blend_arguments(source, target, intervals, eta, gather), torch_pool());
    }
}

template <typename T>
T* data_of(const Tensor& tensor) {
    return static_cast<T*>(tensor.mutable_data_ptr());
}

void paged_op(Tensor q, Tensor keys, Tensor values, Tensor tables, Tensor rows, Tensor lengths,
              Tensor out, int64_t page, double scale, int64_t window) {
    paged({data_of<float>(q), data_of<float>(keys), data_of<float>(values),
           data_of<int64_t>(tables), data_of<int64_t>(rows), data_of<int64_t>(lengths),
           data_of<float>(out), q.size(0), tables.size(1), page, q.size(1), keys.size(1), q.size(2),
           window, static_cast<float>(scale)},
          torch_pool());
}

constexpr const char* paged_schema =
    "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor tables, Tensor rows, "
    "Tensor lengths, Tensor(a!) out, int page, float scale, int window) -> ()";

}  // namespace

STABLE_TORCH_LIBRARY(slurmrl_cpu, m) {
    m.def(gae_schema);
    m.def(scan_schema);
    m.def(copy_schema);
    m.def(paged_schema);
}

STABLE_TORCH_LIBRARY_IMPL(slurmrl_cpu, CPU, m) {
    m.impl("gae", TORCH_BOX(&gae_op));
    m.impl("scan", TORCH_BOX(&scan_op));
    m.impl("copy", TORCH_BOX(&copy_op));
    m.impl("paged_attention", TORCH_BOX(&paged_op));
}

}  // namespace slurmrl::cpu
