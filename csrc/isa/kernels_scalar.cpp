#include "isa/vec_scalar.h"

#define CANTER_ISA scalar
#define CANTER_TABLE kScalarKernels

#include "isa/kernels.inc"
