#include "gemm/linear.h"

#include <algorithm>
#include <cstring>

#include "isa/dispatch.h"
#include "parallel/thread_pool.h"

namespace canter {
namespace {

// Below so many products a region costs more than it saves.
constexpr std::int64_t kSmall = 1 << 15;

void widen_rows(const KernelTable& k, const void* source, DType type, float* out, std::int64_t rows, std::int64_t width) {
    if (type == DType::float32) {
        std::memcpy(out, source, static_cast<std::size_t>(rows * width) * sizeof(float));
        return;
    }
    const auto* values = static_cast<const bf16*>(source);
    constexpr std::int64_t rows_each = 16;
    parallel_for((rows + rows_each - 1) / rows_each, [&](std::int64_t i) {
        const std::int64_t begin = i * rows_each, count = std::min(rows, begin + rows_each) - begin;
        k.widen(values + begin * width, out + begin * width, count * width);
    });
}

}  // namespace

void linear(const LinearCall& call) {
    if (call.rows == 0 || call.outputs == 0) return;
    const KernelTable& k = kernels();
    const bool widen_x = call.x_type != DType::float32, widen_bias = call.bias && call.bias_type != DType::float32;
    float* wide = scratch_floats(Scratch::caller, (widen_x ? call.rows * call.width : 0) + (widen_bias ? call.outputs : 0) + 1);
    LinearArgs args{static_cast<const float*>(call.x), call.weight,  call.weight_type, static_cast<const float*>(call.bias), call.out, call.x_type,
                    call.rows,                         call.outputs, call.width,       linear_block(call.width)};
    if (widen_bias) {
        float* bias = wide + (widen_x ? call.rows * call.width : 0);
        k.widen(static_cast<const bf16*>(call.bias), bias, call.outputs);
        args.bias = bias;
    }
    if (widen_x) {
        widen_rows(k, call.x, call.x_type, wide, call.rows, call.width);
        args.x = wide;
    }

    const std::int64_t row_tiles = (call.rows + kLinearMaxRows - 1) / kLinearMaxRows;
    std::int64_t cols = kLinearMaxCols;
    const auto tiles = [&] { return row_tiles * ((call.outputs + cols - 1) / cols); };
    while (cols > 24 && tiles() < 4 * num_threads()) cols /= 2;
    const auto run = [&](std::int64_t i) {
        const std::int64_t row = i % row_tiles * kLinearMaxRows, col = i / row_tiles * cols;
        const LinearTile tile{row, std::min(row + kLinearMaxRows, call.rows), col, std::min(col + cols, call.outputs)};
        k.linear(args, tile, scratch_floats(Scratch::task, kLinearMaxRows * kLinearMaxCols));
    };
    if (call.rows * call.outputs * call.width < kSmall) {
        for (std::int64_t i = 0; i < tiles(); ++i) run(i);
    } else {
        parallel_for(tiles(), run);
    }
}

}  // namespace canter
