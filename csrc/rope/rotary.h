// Rotary position embedding, in place.
#pragma once

#include <cstdint>

#include "common.h"

namespace canter {

struct RotaryArgs {
    void* q;  // [T, Hq, D]: heads lie next to each other, tokens q_stride elements apart
    void* k;
    DType type;
    std::int64_t q_stride, k_stride;
    const std::int64_t* positions;  // [T]
    const float* cos_sin;  // [max_pos, rot_dim]
    std::int64_t rows, q_heads, k_heads, head_dim, rot_dim, max_pos;
    bool interleaved;  // pairs are elements 2 i and 2 i + 1, not i and i + rot_dim / 2
};

// Throws std::out_of_range for a position outside the table.
void rotary(const RotaryArgs& args);

}  // namespace canter
