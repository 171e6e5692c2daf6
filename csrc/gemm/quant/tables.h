// The kernels of an instruction set.
#pragma once

#include <cstdint>

#include "gemm/quant/layout.h"
#include "gemm/quant/quant.h"

namespace canter {

struct QuantTable {
    void (*quantize)(const QuantizeCall& call, std::int64_t row_begin, std::int64_t row_end);
    void (*tile)(const QuantTile& tile, std::int64_t block_bytes, std::int64_t panel_bytes, std::uint8_t* scratch);
    std::int64_t (*scratch_bytes)(Format format, std::int64_t width, std::int64_t rows);
    int (*streams)(Format format);  // panels read side by side for one row
};

extern const QuantTable kScalarQuant;
#if defined(CANTER_X86)
extern const QuantTable kAvx2Quant;
extern const QuantTable kAvx512Quant;
extern const QuantTable kAvx512VnniQuant;
extern const QuantTable kAmxQuant;
#elif defined(CANTER_ARM)
extern const QuantTable kNeonQuant;
extern const QuantTable kNeonDotQuant;
#endif

}  // namespace canter
