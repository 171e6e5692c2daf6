// y[T, N] = x[T, K] * w[N, K]^T + bias[N]: weights stay as they are stored, sums are float32.
//
// The order of additions of an output depends on K and the instruction set alone. K is cut into blocks of
// linear_block(K) elements; within a block, lane l of a vector sums elements l, l + width, ..., then the lanes are added
// as a tree; blocks are added in order. Every tile shape follows it, so a row has the same bits in any company.
#pragma once

#include <cstdint>

#include "common.h"

namespace canter {

struct LinearArgs {
    const float* x;  // [T, K], rows lie next to each other
    const void* weight;
    DType weight_type;
    const float* bias;  // may be null
    void* out;
    DType out_type;
    std::int64_t rows, outputs, width, block;
};

// Outputs [row_begin, row_end) x [col_begin, col_end).
struct LinearTile {
    std::int64_t row_begin, row_end, col_begin, col_end;
};

inline constexpr std::int64_t kLinearMaxRows = 128;  // most rows and columns of a tile: its scratch has so many floats
inline constexpr std::int64_t kLinearMaxCols = 96;

// Elements of a reduction block: K in equal parts of at most 768, whole vectors of any width.
inline constexpr std::int64_t linear_block(std::int64_t width) {
    const std::int64_t parts = (width + 767) / 768;
    return parts == 0 ? 16 : ((width + parts - 1) / parts + 15) / 16 * 16;
}

struct LinearCall {
    const void* x;
    DType x_type;
    const void* weight;
    DType weight_type;
    const void* bias;  // null for none
    DType bias_type;
    void* out;  // [T, N] of x_type
    std::int64_t rows, outputs, width;
};

void linear(const LinearCall& call);

}  // namespace canter
