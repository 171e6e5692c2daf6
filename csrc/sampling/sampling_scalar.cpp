#include "sampling/lanes_scalar.h"

#define CANTER_ISA scalar
#define CANTER_TABLE kScalarSampling

#include "isa/vec_math.h"

#include "sampling/sampling_kernel.h"
