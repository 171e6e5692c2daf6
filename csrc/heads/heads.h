// Matrix products of each head with a matrix of its own.
#pragma once

#include <cstdint>

#include "common.h"

namespace canter {

struct HeadLinearArgs {
    const void* x;  // [T, H, K], elements of a head in one run
    const void* weight;  // [H, N, K], one matrix behind the other: outputs n_stride elements apart, inputs k_stride, one of them 1
    void* out;  // [T, H, N]
    DType type;
    std::int64_t rows, heads, width, outputs, x_row_stride, x_head_stride, n_stride, k_stride;
};

// out[t, h, n] = sum over k of x[t, h, k] * weight[h, n, k].
void head_linear(const HeadLinearArgs& args);

}  // namespace canter
