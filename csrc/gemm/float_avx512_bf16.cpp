#define CANTER_FLOAT_PAIRS

#include "gemm/float_lanes512.h"

namespace canter {
namespace {

struct Lanes : Lanes512 {
    static pairs set1_pair(std::uint32_t pair) { return _mm512_set1_epi32(static_cast<int>(pair)); }
    static reg dot_pairs(pairs x, pairs w, reg sum) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
};

}  // namespace
}  // namespace canter

#include "gemm/float_kernel.h"

namespace canter {

const FloatKernels kAvx512Bf16FloatKernels = kFloatKernels;

}  // namespace canter
