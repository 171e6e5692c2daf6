// Normalisation of rows: by their root mean square, with or without a residual added first; by mean and variance; cut to the largest.
#pragma once

#include <cstdint>

#include "common.h"

namespace canter {

struct NormArgs {
    const void* x;  // [rows, H], in runs of `group` rows, the runs `x_stride` elements apart: heads in a fused projection
    const void* residual;  // [rows, H], or null: then total is null too
    const void* weight;  // [H]
    void* out;
    void* total;  // x + residual
    DType type, weight_type;
    std::int64_t rows, width, group, x_stride;
    float eps;
    bool plus_one, cast_first;
};

struct LayerNormArgs {
    const void* x;  // [rows, H]
    const void* weight;  // [H]
    const void* bias;  // [H] of the weight's type, or null
    void* out;
    DType type, weight_type;
    std::int64_t rows, width;
    float eps;
};

struct SparseReluArgs {
    const void* x;  // [rows, width], rows x_stride elements apart
    void* out;  // [rows, width]
    DType type;
    std::int64_t rows, width, x_stride;
    float deviations;
};

void rms_norm(const NormArgs& args);
// (x - mean) / sqrt(variance + eps) * weight + bias.
void layer_norm(const LayerNormArgs& args);
// max(0, x - (mean + deviations * standard deviation)), both of the row.
void sparse_relu(const SparseReluArgs& args);

}  // namespace canter
