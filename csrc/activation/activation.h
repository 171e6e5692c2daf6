// Gated activations, soft capping, and what else is done to elements one by one.
#pragma once

#include <cstdint>

#include "common.h"

namespace canter {

enum class Activation : int { silu = 0, gelu_tanh = 1, gelu = 2 };

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

// silu(x), relu(x)^2, x * factors[column], x * sigmoid(y), x * silu(y), a x + b y, GELU of x by tanh and by erf, x * GELU of y by tanh.
enum class Pointwise : int {
    silu = 0,
    relu_squared = 1,
    scale_columns = 2,
    sigmoid_mul = 3,
    silu_mul = 4,
    weighted_sum = 5,
    gelu_tanh = 6,
    gelu = 7,
    gelu_tanh_mul = 8,
};

struct PointwiseArgs {
    const void* x;  // [T, width], rows x_stride elements apart
    const void* y;  // the same; x itself where a kind has one input
    const float* factors;  // [width], of scale_columns
    void* out;  // [T, width]
    DType type;
    Pointwise kind;
    std::int64_t rows, width, x_stride, y_stride;
    float a, b;  // of weighted_sum
};

void gated(const GatedArgs& args);
void pointwise(const PointwiseArgs& args);
void softcap(const SoftcapArgs& args);

}  // namespace canter
