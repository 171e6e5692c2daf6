#define CANTER_ISA neon

#include "bench/limits_neon_kernel.h"

namespace canter {

const LimitKernels kNeonLimits = {neon::read_streams, neon::fma_f32, nullptr, neon::dot_int8, neon::kSums * 4 * 2, 0,
                                  neon::kSums * neon::kProducts * 2};

}  // namespace canter
