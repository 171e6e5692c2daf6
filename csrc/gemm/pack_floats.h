// Float weights into panels, and panels of any format back into rows.
#pragma once

#include <cstdint>

#include "gemm/format.h"

namespace canter {

enum class SourceType : int { f32, bf16, f16 };

// Rows of `width` elements, row_stride elements apart, into the panels of outputs [0, outputs). Output n is row
// row_index[n], or n where that is null. Format i8 rounds each row to int8 with a scale of amax / 127.
struct PackFloatsCall {
    Format format;  // f32, bf16 or i8
    const void* source;
    SourceType source_type;
    std::int64_t row_stride;
    const std::int64_t* row_index;
    std::int64_t outputs, width;
    std::uint8_t* dest;
};

// Throws std::invalid_argument for other formats.
void pack_floats(const PackFloatsCall& call);

}  // namespace canter
