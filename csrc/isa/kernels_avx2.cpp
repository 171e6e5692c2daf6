#include "isa/vec_avx2.h"

#define CANTER_ISA avx2
#define CANTER_TABLE kAvx2Kernels

#include "isa/kernels.inc"
