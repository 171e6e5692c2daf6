// y[T, N] = x[T, K] * W[N, K]^T + bias[N] over packed weights.
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"
#include "gemm/format.h"

namespace canter {

// A weight matrix: parts of equal width whose outputs lie side by side. The memory is its owner's business.
struct Matrix {
    // Throws std::invalid_argument for no parts, widths that differ or don't suit their formats, and unaligned data.
    explicit Matrix(std::vector<Weights> parts);

    std::vector<Weights> parts;
    std::int64_t outputs, width;
};

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

// Outputs [begin, end) of a matrix as floats: out[end - begin, width].
void unpack_rows(const Matrix& matrix, std::int64_t begin, std::int64_t end, float* out);

}  // namespace canter
