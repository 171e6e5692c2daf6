#define CANTER_ISA neon

#include "gemm/quant/ops_neon.h"
#include "gemm/quant/tables.h"

#include "gemm/quant/quant_kernel.h"

namespace canter {

const QuantTable kNeonQuant = {&neon::quantize_rows, &neon::quant_tile, &neon::quant_scratch, &neon::quant_streams};

}  // namespace canter
