// Root-mean-square normalisation of rows, with or without a residual added first.
#pragma once

#include <cstdint>

#include "common.h"

namespace canter {

struct NormArgs {
    const void* x;  // [T, H]
    const void* residual;  // [T, H], or null: then total is null too
    const void* weight;  // [H]
    void* out;
    void* total;  // x + residual
    DType type, weight_type;
    std::int64_t rows, width;
    float eps;
    bool plus_one, cast_first;
};

void rms_norm(const NormArgs& args);

}  // namespace canter
