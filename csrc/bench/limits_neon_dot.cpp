#define CANTER_ISA neon_dot

#include "bench/limits_neon_kernel.h"

namespace canter {

const LimitKernels kNeonDotLimits = {neon_dot::read_streams, neon_dot::fma_f32, nullptr, neon_dot::dot_int8, neon_dot::kSums * 4 * 2, 0,
                                     neon_dot::kSums * neon_dot::kProducts * 2};

}  // namespace canter
