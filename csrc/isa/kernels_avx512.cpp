#include "isa/vec_avx512.h"

#define CANTER_ISA avx512
#define CANTER_TABLE kAvx512Kernels

#include "isa/kernels.inc"
