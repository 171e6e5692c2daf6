// Four lanes: NEON. Twenty-four sums, four weights and a broadcast leave a few of the registers for what comes next.
#include "gemm/float_table.h"
#include "isa/vec_neon.h"

namespace canter {
namespace {

struct Lanes {
    static constexpr int width = 4;
    static constexpr int max_rows = 6, few_rows = 6, block_panels = 1;
    static constexpr int stream_panels(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : rows == 3 ? 2 : 1; }

    using reg = float32x4_t;
    using pairs = uint32x4_t;

    static reg zero() { return vdupq_n_f32(0.0f); }
    static reg set1(float x) { return vdupq_n_f32(x); }
    static reg load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, reg v) { vst1q_f32(p, v); }
    static reg load_bf16(const bf16* p) { return neon::Vec::load(p); }
    static void store_bf16(bf16* p, reg v) { neon::Vec::store(p, v); }
    static reg add(reg a, reg b) { return vaddq_f32(a, b); }
    static reg fma(reg a, reg b, reg c) { return vfmaq_f32(c, a, b); }
    static void pin(reg& v) { asm volatile("" : "+w"(v)); }

    static pairs load_pairs(const std::uint8_t* p) { return vld1q_u32(reinterpret_cast<const std::uint32_t*>(p)); }
    static reg even(pairs p) { return vreinterpretq_f32_u32(vshlq_n_u32(p, 16)); }
    static reg odd(pairs p) { return vreinterpretq_f32_u32(vandq_u32(p, vdupq_n_u32(0xffff0000u))); }
};

}  // namespace
}  // namespace canter

#include "gemm/float_kernel.h"

namespace canter {

const FloatKernels kNeonFloatKernels = kFloatKernels;

}  // namespace canter
