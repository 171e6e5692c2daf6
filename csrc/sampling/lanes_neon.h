// Integer lanes and comparisons beside isa/vec_neon.h.
#pragma once

#include "isa/vec_neon.h"

namespace canter::neon {

struct Lanes {
    using ireg = int32x4_t;

    static ireg set1(std::int32_t x) { return vdupq_n_s32(x); }
    static ireg load(const std::int32_t* p) { return vld1q_s32(p); }
    static void store(std::int32_t* p, ireg a) { vst1q_s32(p, a); }
    static ireg exclusive_or(ireg a, ireg b) { return veorq_s32(a, b); }
    static ireg add(ireg a, ireg b) { return vaddq_s32(a, b); }
    static ireg multiply(ireg a, ireg b) { return vmulq_s32(a, b); }
    template <int n>
    static ireg shift_right(ireg a) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), n)); }
    template <int n>
    static ireg shift_right_signed(ireg a) { return vshrq_n_s32(a, n); }
    static Vec::reg to_float(ireg a) { return vcvtq_f32_s32(a); }
    static ireg truncate(Vec::reg a) { return vcvtq_s32_f32(a); }
    static ireg bits(Vec::reg a) { return vreinterpretq_s32_f32(a); }

    // NEON has no instruction that gathers a bit of each lane: the lanes keep a bit of their own, and are added.
    static unsigned mask(uint32x4_t m) {
        constexpr uint32x4_t places = {1, 2, 4, 8};
        return vaddvq_u32(vandq_u32(m, places));
    }
    static unsigned greater(Vec::reg a, Vec::reg b) { return mask(vcgtq_f32(a, b)); }
    static unsigned at_least(Vec::reg a, Vec::reg b) { return mask(vcgeq_f32(a, b)); }
    static unsigned equal(Vec::reg a, Vec::reg b) { return mask(vceqq_f32(a, b)); }
    static bool any_nan(Vec::reg a, Vec::reg b) { return vminvq_u32(vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b))) == 0; }
    static bool any_set(ireg a) { return vmaxvq_u32(vreinterpretq_u32_s32(a)) != 0; }
};

}  // namespace canter::neon
