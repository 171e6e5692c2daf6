#define CANTER_ISA avx512_vnni

#include "bench/limits_avx512_kernel.h"

namespace canter {

const LimitKernels kAvx512VnniLimits = {avx512_vnni::read_streams,
                                avx512_vnni::fma_f32,
                                nullptr,
                                avx512_vnni::dot_int8,
                                avx512_vnni::kSums * 16 * 2,
                                0,
                                avx512_vnni::kSums * 64 * 2};

}  // namespace canter
