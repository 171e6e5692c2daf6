#define CANTER_ISA avx512_bf16

#include "bench/limits_avx512_kernel.h"

namespace canter {

const LimitKernels kAvx512Bf16Limits = {avx512_bf16::read_streams,
                                avx512_bf16::fma_f32,
                                avx512_bf16::dot_bf16,
                                avx512_bf16::dot_int8,
                                avx512_bf16::kSums * 16 * 2,
                                avx512_bf16::kSums * 32 * 2,
                                avx512_bf16::kSums * 64 * 2};

}  // namespace canter
