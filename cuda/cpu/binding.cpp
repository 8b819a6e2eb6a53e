// The CPU operators as torch operators, in torch's stable ABI.

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
              Tensor out, int64_t page, double scale, int64_t window, std::optional<Tensor> sinks) {
    paged({data_of<float>(q), data_of<float>(keys), data_of<float>(values),
           data_of<int64_t>(tables), data_of<int64_t>(rows), data_of<int64_t>(lengths),
           data_of<float>(out), q.size(0), tables.size(1), page, q.size(1), keys.size(1), q.size(2),
           window, static_cast<float>(scale), static_cast<const float*>(pointer(sinks))},
          torch_pool());
}

void decode_op(Tensor heads, std::optional<Tensor> cos, std::optional<Tensor> sin, Tensor keys,
               Tensor values, Tensor slots, Tensor tables, Tensor rows, Tensor lengths, Tensor out,
               int64_t page, double scale, int64_t window, std::optional<Tensor> sinks) {
    const int64_t kv_heads = keys.size(1);
    decode({{nullptr, data_of<float>(keys), data_of<float>(values), data_of<int64_t>(tables),
             data_of<int64_t>(rows), data_of<int64_t>(lengths), data_of<float>(out), heads.size(0),
             tables.size(1), page, heads.size(1) - 2 * kv_heads, kv_heads, heads.size(2), window,
             static_cast<float>(scale), static_cast<const float*>(pointer(sinks))},
            data_of<float>(heads), static_cast<const float*>(pointer(cos)),
            static_cast<const float*>(pointer(sin)), data_of<int64_t>(slots), data_of<float>(keys),
            data_of<float>(values)},
           torch_pool());
}

void pack_op(Tensor weight, Tensor packed) {
    pack(data_of<float>(weight), weight.size(0), weight.size(1), data_of<float>(packed));
}

void product_op(Tensor x, Tensor packed, std::optional<Tensor> bias, std::optional<Tensor> added,
                Tensor out) {
    product({data_of<float>(x), data_of<float>(packed), static_cast<const float*>(pointer(bias)),
             static_cast<const float*>(pointer(added)), data_of<float>(out), x.size(0), x.size(1),
             out.size(1), x.stride(0)},
            torch_pool());
}

void layer_op(Tensor x, Tensor weights, std::optional<Tensor> cos, std::optional<Tensor> sin,
              Tensor keys, Tensor values, Tensor slots, Tensor tables, Tensor rows, Tensor lengths,
              Tensor out, int64_t heads, int64_t inner, int64_t page, double scale, int64_t window,
              double first_eps, double second_eps) {
    const Paged paged{nullptr, data_of<float>(keys), data_of<float>(values),
                      data_of<int64_t>(tables), data_of<int64_t>(rows), data_of<int64_t>(lengths),
                      nullptr, x.size(0), tables.size(1), page, heads, keys.size(1), keys.size(2),
                      window, static_cast<float>(scale), nullptr};
    const Decode decode{paged, nullptr, static_cast<const float*>(pointer(cos)),
                        static_cast<const float*>(pointer(sin)), data_of<int64_t>(slots),
                        data_of<float>(keys), data_of<float>(values)};
    layer({decode, data_of<float>(x), data_of<float>(weights), data_of<float>(out), x.size(1),
           inner, static_cast<float>(first_eps), static_cast<float>(second_eps)},
          torch_pool());
}

void norm_op(Tensor x, Tensor weight, Tensor out, Tensor scales, double eps, double offset) {
    norm({data_of<float>(x), data_of<float>(weight), data_of<float>(out), data_of<float>(scales),
          scales.numel(), weight.numel(), static_cast<float>(eps), static_cast<float>(offset)},
         torch_pool());
}

void norm_gradient_op(Tensor grad, Tensor x, Tensor weight, Tensor scales, Tensor grad_x,
                      Tensor grad_weight, double offset) {
    norm_gradient({data_of<float>(grad), data_of<float>(x), data_of<float>(weight),
                   data_of<float>(scales), data_of<float>(grad_x), data_of<float>(grad_weight),
                   scales.numel(), weight.numel(), static_cast<float>(offset)},
                  torch_pool());
}

void gated_op(Tensor gate, Tensor up, Tensor product) {
    gated({data_of<float>(gate), data_of<float>(up), nullptr, data_of<float>(product), nullptr,
           product.size(0), product.size(1), gate.stride(0)},
          torch_pool());
}

void gated_gradient_op(Tensor gate, Tensor up, Tensor grad, Tensor product, Tensor gradients) {
    gated_gradient({data_of<float>(gate), data_of<float>(up), data_of<float>(grad),
                    data_of<float>(product), data_of<float>(gradients), product.size(0),
                    product.size(1), gate.stride(0)},
                   torch_pool());
}

void rotate_op(Tensor x, Tensor cos, Tensor sin, Tensor out, double sign) {
    rotate({data_of<float>(x), data_of<float>(cos), data_of<float>(sin), data_of<float>(out),
            x.size(0), x.size(1), x.size(2), x.stride(0), static_cast<float>(sign)},
           torch_pool());
}

constexpr const char* paged_schema =
    "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor tables, Tensor rows, "
    "Tensor lengths, Tensor(a!) out, int page, float scale, int window, Tensor? sinks) -> ()";

}  // namespace

STABLE_TORCH_LIBRARY(slurmrl_cpu, m) {
    m.def(gae_schema);
    m.def(scan_schema);
    m.def(copy_schema);
    m.def(paged_schema);
    m.def("decode(Tensor heads, Tensor? cos, Tensor? sin, Tensor(a!) keys, Tensor(b!) values, "
          "Tensor slots, Tensor tables, Tensor rows, Tensor lengths, Tensor(c!) out, int page, "
          "float scale, int window, Tensor? sinks) -> ()");
    m.def("pack(Tensor weight, Tensor(a!) packed) -> ()");
    m.def("product(Tensor x, Tensor packed, Tensor? bias, Tensor? added, Tensor(a!) out) -> ()");
    m.def("layer(Tensor x, Tensor weights, Tensor? cos, Tensor? sin, Tensor(a!) keys, "
          "Tensor(b!) values, Tensor slots, Tensor tables, Tensor rows, Tensor lengths, "
          "Tensor(c!) out, int heads, int inner, int page, float scale, int window, "
          "float first_eps, float second_eps) -> ()");
    m.def("norm(Tensor x, Tensor weight, Tensor(a!) out, Tensor(b!) scales, float eps, "
          "float offset) -> ()");
    m.def("norm_gradient(Tensor grad, Tensor x, Tensor weight, Tensor scales, Tensor(a!) grad_x, "
          "Tensor(b!) grad_weight, float offset) -> ()");
    m.def("gated(Tensor gate, Tensor up, Tensor(a!) product) -> ()");
    m.def("gated_gradient(Tensor gate, Tensor up, Tensor grad, Tensor(a!) product, "
          "Tensor(b!) gradients) -> ()");
    m.def("rotate(Tensor x, Tensor cos, Tensor sin, Tensor(a!) out, float sign) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(slurmrl_cpu, CPU, m) {
    m.impl("gae", TORCH_BOX(&gae_op));
    m.impl("scan", TORCH_BOX(&scan_op));
    m.impl("copy", TORCH_BOX(&copy_op));
    m.impl("paged_attention", TORCH_BOX(&paged_op));
    m.impl("decode", TORCH_BOX(&decode_op));
    m.impl("pack", TORCH_BOX(&pack_op));
    m.impl("product", TORCH_BOX(&product_op));
    m.impl("layer", TORCH_BOX(&layer_op));
    m.impl("norm", TORCH_BOX(&norm_op));
    m.impl("norm_gradient", TORCH_BOX(&norm_gradient_op));
    m.impl("gated", TORCH_BOX(&gated_op));
    m.impl("gated_gradient", TORCH_BOX(&gated_gradient_op));
    m.impl("rotate", TORCH_BOX(&rotate_op));
}

}  // namespace slurmrl::cpu
