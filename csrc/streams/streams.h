// Rows of several residual streams [T, S, H] side by side: mixed, added to, brought to the magnitude of the first.
#pragma once

#include <cstdint>

#include "common.h"

namespace canter {

constexpr std::int64_t kMaxStreams = 16;

struct StreamArgs {
    const void* x;  // [T, S * H]; of match_streams [T, (S - 1) * H]
    const void* row;  // [T, H], rows row_stride elements apart: what is added, or the first stream
    const void* coefs;  // [T, S * S] or [T, S], or null for ones
    void* out;  // [T, S * H]
    DType type;
    std::int64_t rows, streams, width, row_stride;
    float scale, offset;  // what coefficients c count as: scale * c + offset
    std::int64_t first;  // streams before this one are left as they are
};

// out[o] = x[o] + sum over i of scale * coefs[o, i] * x[i].
void mix_streams(const StreamArgs& args);
// out[s] = x[s] + (scale * coefs[s] + offset) * row, for s from `first` on.
void add_to_streams(const StreamArgs& args);
// out[0] = row; out[s + 1] = x[s], times what brings its root mean square to that of row.
void match_streams(const StreamArgs& args);

struct ConcatArgs {
    const void* x;  // rows of x_bytes, x_stride bytes apart
    const void* y;
    void* out;  // rows of x_bytes + y_bytes
    std::int64_t rows, x_bytes, y_bytes, x_stride, y_stride;
};

// Rows of x and y side by side.
void concat(const ConcatArgs& args);

}  // namespace canter
