#include "gemm/quant/ops_scalar.h"
#include "gemm/quant/tables.h"

#define CANTER_ISA scalar

#include "gemm/quant/quant_kernel.h"

namespace canter {

const QuantTable kScalarQuant = {&scalar::quantize_rows, &scalar::quant_tile, &scalar::quant_scratch, &scalar::quant_streams};

}  // namespace canter
