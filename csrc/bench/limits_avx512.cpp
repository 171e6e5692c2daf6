#define CANTER_ISA avx512

#include "bench/limits_avx512_kernel.h"

namespace canter {

const LimitKernels kAvx512Limits = {avx512::read_streams,
                                avx512::fma_f32,
                                nullptr,
                                avx512::dot_int8,
                                avx512::kSums * 16 * 2,
                                0,
                                avx512::kSums * 64 * 2};

}  // namespace canter
