#include "isa/vec_neon.h"

#define CANTER_ISA neon
#define CANTER_TABLE kNeonKernels

#include "isa/kernels.inc"
