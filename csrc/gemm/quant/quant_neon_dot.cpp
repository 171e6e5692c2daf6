#define CANTER_ISA neon_dot
#define CANTER_DOT

#include "gemm/quant/ops_neon.h"
#include "gemm/quant/tables.h"

#include "gemm/quant/quant_kernel.h"

namespace canter {

const QuantTable kNeonDotQuant = {&neon_dot::quantize_rows, &neon_dot::quant_tile, &neon_dot::quant_scratch, &neon_dot::quant_streams};

}  // namespace canter
