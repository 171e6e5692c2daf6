// Gated activations and soft capping.
#pragma once

#include <cstdint>

#include "common.h"

namespace canter {

enum class Activation : int { silu = 0, gelu_tanh = 1 };

struct GatedArgs {
    const void* gate_up;  // [T, 2I], the gate half first
    void* out;  // [T, I]
    DType type;
    Activation activation;
    std::int64_t rows, width;  // width: I
};

struct SoftcapArgs {
    const void* x;
    void* out;
    DType type;
    std::int64_t count;
    float cap;
};

void gated(const GatedArgs& args);
void softcap(const SoftcapArgs& args);

}  // namespace canter
