#include "sampling/lanes_neon.h"

#define CANTER_ISA neon
#define CANTER_TABLE kNeonSampling

#include "isa/vec_math.h"

#include "sampling/sampling_kernel.h"
