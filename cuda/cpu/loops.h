// The operators on a CPU. Free of torch, so that they can be tested under sanitizers alone.
#pragma once

#include <cstdint>

#include "../arguments.h"

namespace slurmrl::cpu {

// Calls body(part, context) once for each 0 <= part < parts, in any order and on any thread.
using Body = void (*)(int64_t part, void* context);
struct Pool {
    void (*run)(int64_t parts, Body body, void* context);
    int64_t threads;
};

void gae(const Gae& arguments, const Pool& pool);
void scan(const Scan& arguments, const Pool& pool);
void move(const Move& arguments, const Pool& pool);
void blend(const Blend& arguments, const Pool& pool);

}  // namespace slurmrl::cpu
