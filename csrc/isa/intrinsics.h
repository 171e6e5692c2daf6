// The x86 intrinsics. Where CANTER_SIMDE is defined, those that the machine lacks are emulated: for trying kernels out on
// machines that can't run them.
#pragma once

#if defined(CANTER_SIMDE)
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <immintrin.h>
#include <simde/x86/avx512.h>
#else
#include <immintrin.h>
#endif
