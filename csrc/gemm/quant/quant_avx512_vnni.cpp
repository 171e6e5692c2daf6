#define CANTER_ISA avx512_vnni
#define CANTER_VNNI

#include "gemm/quant/ops_avx512.h"
#include "gemm/quant/tables.h"

#include "gemm/quant/quant_kernel.h"

namespace canter {

const QuantTable kAvx512VnniQuant = {&avx512_vnni::quantize_rows, &avx512_vnni::quant_tile, &avx512_vnni::quant_scratch,
                                     &avx512_vnni::quant_streams};

}  // namespace canter
