// Tests of the CUDA kernels on a CPU, under sanitizers (emulated/cuda_runtime_api.h). They do not
// cover the memory order of a GPU, its speed and the code that nvcc generates.

#include "../gpu/launch.h"
#include "checks.h"

namespace {

using namespace slurmrl;

struct Emulated {
    // Exactly as long as the kernels request, and filled with old data.
    static std::vector<char> scratch_for(int64_t tokens, Dtype dtype) {
        return std::vector<char>(static_cast<size_t>(gpu::scan_scratch_bytes(tokens, dtype)), 9);
    }
    static void check(cudaError_t error) { tests::expect(error == cudaSuccess, "launch", error); }

    void gae(const Gae& arguments) const {
        check(gpu::gae(arguments, scratch_for(arguments.tokens, arguments.dtype).data(), nullptr));
    }
    void scan(const Scan& arguments) const {
        check(gpu::scan(arguments, scratch_for(arguments.tokens, arguments.dtype).data(), nullptr));
    }
    void move(const Move& arguments) const { check(gpu::move(arguments, nullptr)); }
    void blend(const Blend& arguments) const { check(gpu::blend(arguments, nullptr)); }
};

// The host does not read offsets on a GPU. With wrong offsets the results are wrong, but the
// kernels never access memory outside the buffers.
void check_wrong_offsets(std::mt19937& random) {
    const int64_t tokens = 9000, sequences = 3;
    const auto rewards = tests::numbers<float>(tokens, random);
    const auto values = tests::numbers<float>(tokens + sequences, random);
    const auto aligned = tests::numbers<float>(tokens, random);
    const auto ends = tests::numbers<float>(sequences, random);
    const bool truncated[sequences] = {true, false, true};
    std::vector<float> advantages(static_cast<size_t>(tokens)), returns(advantages);
    const std::vector<std::vector<int32_t>> wrong{
        {0, 10, 20, 30}, {5, 10, 20, 9000}, {0, 8000, 20, 9000}, {0, 1 << 30, 1 << 30, 1 << 30},
        {-5, -4, -3, -2}};
    for (const auto& cu : wrong) {
        Emulated().gae({rewards.data(), values.data(), nullptr, truncated, {cu.data(), false},
                        advantages.data(), returns.data(), tokens, sequences, 0.9, 0.9,
                        Dtype::float32});
        Emulated().gae({rewards.data(), aligned.data(), ends.data(), truncated,
                        {cu.data(), false}, advantages.data(), returns.data(), tokens, sequences,
                        0.9, 0.9, Dtype::float32});
        Emulated().scan({rewards.data(), aligned.data(), ends.data(), {cu.data(), false},
                         advantages.data(), tokens, sequences, 0.9, Dtype::float32});
    }
}

// A sequence of more than 32 tiles without discount, so that each value affects all earlier tokens.
void check_many_tiles(std::mt19937& random) {
    const int64_t tokens = 300000;
    std::vector<double> x(static_cast<size_t>(tokens)), y(x);
    for (auto& one : x) one = static_cast<double>(random() % 16);
    const int64_t cu[2] = {0, tokens};
    Emulated().scan({x.data(), nullptr, nullptr, {cu, true}, y.data(), tokens, 1, 1.0,
                     Dtype::float64});
    double sum = 0.0;
    for (int64_t t = tokens - 1; t >= 0; --t) {
        sum += x[static_cast<size_t>(t)];
        tests::expect(y[static_cast<size_t>(t)] == sum, "sum over many tiles", t);
    }
}

}  // namespace

int main() {
    std::mt19937 random(11);
    std::uniform_int_distribution<int64_t> draw(0, 60);
    std::vector<int64_t> several(200);
    for (auto& length : several) length = draw(random);
    const std::vector<std::vector<int64_t>> batches{
        {}, {0}, {1}, {0, 0, 3, 0}, {127, 1, 129, 0, 4095, 4097}, several};
    for (const auto& lengths : batches) {
        tests::check_all_types(lengths, Emulated{}, random);
    }
    check_wrong_offsets(random);
    check_many_tiles(random);
    std::puts("all kernels as expected");
}
