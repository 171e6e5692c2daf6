#include "gemm/quant/ops_avx2.h"
#include "gemm/quant/tables.h"

#define CANTER_ISA avx2

#include "gemm/quant/quant_kernel.h"

namespace canter {

const QuantTable kAvx2Quant = {&avx2::quantize_rows, &avx2::quant_tile, &avx2::quant_scratch, &avx2::quant_streams};

}  // namespace canter
