#include "sampling/lanes_avx512.h"

#define CANTER_ISA avx512
#define CANTER_TABLE kAvx512Sampling

#include "isa/vec_math.h"

#include "sampling/sampling_kernel.h"
