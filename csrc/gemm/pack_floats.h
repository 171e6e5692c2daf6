// Float weights into panels, and panels of any format back into rows.
#pragma once

#include <cstdint>

#include "gemm/format.h"

namespace canter {

enum class SourceType : int { f32, bf16, f16 };

// Rows of `width` elements, row_stride elements apart, into the panels of outputs [0, outputs). Output n is row
// row_index[n], or n where that is null. Format q8_0 rounds as GGUF's quantiser does, bit for bit: d = amax / 127 of every 32
// elements, codes x * (1 / d) to the nearest, halves away from zero, and then d to float16. So a block of magnitudes beyond 8
// million is infinite; a value that is not finite makes all of its block NaN.
struct PackFloatsCall {
    Format format;  // f32, bf16 or q8_0
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
