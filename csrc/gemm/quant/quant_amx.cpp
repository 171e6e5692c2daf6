// The kernels of VNNI, and tiles where there are rows enough.
#define CANTER_ISA amx
#define CANTER_VNNI
#define CANTER_AMX

#include "gemm/quant/ops_avx512.h"
#include "gemm/quant/tables.h"

#include "gemm/quant/quant_kernel.h"

namespace canter {

const QuantTable kAmxQuant = {&amx::quantize_rows, &amx::quant_tile, &amx::quant_scratch, &amx::quant_streams};

}  // namespace canter
