#define CANTER_ISA avx512

#include "gemm/quant/ops_avx512.h"
#include "gemm/quant/tables.h"

#include "gemm/quant/quant_kernel.h"

namespace canter {

const QuantTable kAvx512Quant = {&avx512::quantize_rows, &avx512::quant_tile, &avx512::quant_scratch, &avx512::quant_streams};

}  // namespace canter
