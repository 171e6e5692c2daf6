// Root-mean-square normalisation of rows, with or without a residual added first.
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

void rms_norm(const NormArgs& args);

}  // namespace canter
