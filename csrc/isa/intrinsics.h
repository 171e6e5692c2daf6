// The x86 intrinsics. With CANTER_SIMDE those of AVX-512 and AMX are emulated, so that its kernels run on machines with AVX2.
#pragma once

#if defined(CANTER_SIMDE)
#include "isa/emulated_avx512.h"

#include "isa/emulated_amx.h"
#else
#include <immintrin.h>
#endif
