#include "sampling/lanes_avx2.h"

#define CANTER_ISA avx2
#define CANTER_TABLE kAvx2Sampling

#include "isa/vec_math.h"

#include "sampling/sampling_kernel.h"
