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

}  // namespace

int main() {
    std::mt19937 random(7);
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
