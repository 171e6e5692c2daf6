// y[T, N] = x[T, K] * W[N, K]^T + bias[N] over packed weights. Replaces linear.h once every caller packs.
#pragma once

#include <cstdint>

#include "common.h"
#include "gemm/format.h"

namespace canter {

// One matrix may be several, of equal width, whose outputs lie side by side in the order of `parts`.
struct MatmulCall {
    const void* x;  // rows of `width` elements, `x_stride` elements apart
    DType x_type;
    std::int64_t x_stride;
    const Weights* parts;
    std::int64_t num_parts;
    const void* bias;  // null for none
    DType bias_type;
    void* out;  // rows of all parts' outputs, `out_stride` elements apart
    DType out_type;
    std::int64_t out_stride;
    std::int64_t rows, width;
};

void matmul(const MatmulCall& call);

}  // namespace canter
