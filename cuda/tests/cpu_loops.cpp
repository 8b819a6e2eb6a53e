// The CPU loops under sanitizers.

#include <thread>

#include "../cpu/loops.h"
#include "checks.h"

namespace {

using namespace slurmrl;

void run_on_threads(int64_t parts, cpu::Body body, void* context) {
    std::vector<std::thread> threads;
    for (int64_t part = 0; part < parts; ++part) threads.emplace_back(body, part, context);
    for (auto& thread : threads) thread.join();
}

struct OnPool {
    cpu::Pool pool;

    void gae(const Gae& arguments) const { cpu::gae(arguments, pool); }
    void scan(const Scan& arguments) const { cpu::scan(arguments, pool); }
    void move(const Move& arguments) const { cpu::move(arguments, pool); }
    void blend(const Blend& arguments) const { cpu::blend(arguments, pool); }
};

// Rows and columns that do not fill a tile or a panel, and a row that is wider than the input.
void check_products(const cpu::Pool& pool, std::mt19937& random) {
    std::uniform_real_distribution<float> draw(-1, 1);
    for (const int64_t rows : {0, 1, 70}) {
        for (const int64_t outer : {1, 32, 45}) {
            const int64_t inner = 5, stride = 7;
            std::vector<float> x(rows * stride), weight(outer * inner), bias(outer);
            std::vector<float> out(rows * outer), packed(cpu::panels_of(outer) * cpu::panel * inner);
            for (auto* values : {&x, &weight, &bias, &out}) {
                for (auto& value : *values) value = draw(random);
            }
            const std::vector<float> added = out;
            cpu::pack(weight.data(), outer, inner, packed.data());
            cpu::product({x.data(), packed.data(), bias.data(), out.data(), out.data(), rows, inner,
                          outer, stride},
                         pool);
            for (int64_t at = 0; at < rows * outer; ++at) {
                const int64_t row = at / outer, column = at % outer;
                float wanted = bias[column] + added[at];
                for (int64_t i = 0; i < inner; ++i) {
                    wanted += x[row * stride + i] * weight[column * inner + i];
                }
                tests::expect(std::abs(out[at] - wanted) < 1e-5F, "products", at);
            }
        }
    }
}

}  // namespace

int main() {
    std::mt19937 random(7);
    for (const int64_t threads : {1, 3}) check_products({run_on_threads, threads}, random);
    std::uniform_int_distribution<int64_t> draw(0, 400);
    std::vector<int64_t> several(500);
    for (auto& length : several) length = draw(random);
    const std::vector<std::vector<int64_t>> batches{
        {}, {0}, {1}, {0, 0, 3, 0}, {2, 1, 7, 64, 65, 4097}, {150000}, several};
    for (const auto& lengths : batches) {
        for (const int64_t threads : {1, 3}) {
            tests::check_all_types(lengths, OnPool{{run_on_threads, threads}}, random);
        }
    }
    std::puts("all loops as expected");
}
