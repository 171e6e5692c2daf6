// What each instruction set provides for float weights, and for the sums of all formats.
#pragma once

#include <cstdint>

#include "common.h"
#include "gemm/format.h"
#include "isa/isa.h"

namespace canter {

// Elements of the width that many-row kernels walk through before they turn to other outputs: their weights stay in the
// first-level cache meanwhile. Even, for bf16 weights lie in pairs.
inline constexpr std::int64_t kChunk = 256;

// Rows as a kernel reads them: element k of row r lies at r * row_stride + k / chunk * chunk_stride + k % chunk. Kernels
// for many rows expect chunk and row_stride to be kChunk; those for few want one chunk.
struct RowsView {
    const void* data;
    std::int64_t row_stride, chunk, chunk_stride;
};

// Copies rows [row_begin, row_end) of x into a view, floats or bf16 (bf16 only from bf16).
struct PackRowsCall {
    const void* x;
    DType x_type;
    std::int64_t x_stride, width;
    void* data;
    DType type;
    std::int64_t row_stride, chunk, chunk_stride;
};

// Panels [panel_begin, panel_end) of w times rows [row_begin, row_end). `sums` takes those of row row_begin first, sixteen
// floats a panel, the next row sums_stride floats on.
struct FloatTile {
    const Weights* w;
    RowsView rows;
    bool pairs;  // rows are bf16: only for bf16 weights and kernels that have `pairs`
    bool few;    // at most few_rows rows, in one chunk
    std::int64_t panel_begin, panel_end, row_begin, row_end;
    float* sums;
    std::int64_t sums_stride;
};

// out[r, c] = sums[r, c] + bias[c].
struct StoreSumsCall {
    const float* sums;
    std::int64_t sums_stride;
    const void* bias;  // null for none
    DType bias_type;
    void* out;
    DType out_type;
    std::int64_t out_stride, rows, outputs;
};

struct FloatKernels {
    std::int64_t few_rows;       // up to so many rows, weights stream through once
    std::int64_t stream_panels;  // panels that the one-row kernel reads side by side
    std::int64_t block_panels;   // the same for many rows
    bool pairs;                  // bf16 rows stay bf16 where weights are bf16
    void (*pack_rows)(const PackRowsCall&, std::int64_t row_begin, std::int64_t row_end);
    void (*tile)(const FloatTile&);
    void (*store_sums)(const StoreSumsCall&);
};

extern const FloatKernels kScalarFloatKernels;
#if defined(CANTER_X86)
extern const FloatKernels kAvx2FloatKernels;
extern const FloatKernels kAvx512FloatKernels;
extern const FloatKernels kAvx512Bf16FloatKernels;
#elif defined(CANTER_ARM)
extern const FloatKernels kNeonFloatKernels;
#endif

const FloatKernels& float_kernels();

}  // namespace canter
