// Four lanes: NEON of AArch64, which every such machine has. Beyond the portable vectors: fused multiply-adds, and
// conversions from and to bfloat16 in a few instructions.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "common.h"

namespace canter::neon {

struct Vec {
    static constexpr int width = 4;
    static constexpr int registers = 32;
    using reg = float32x4_t;

    static reg set1(float x) { return vdupq_n_f32(x); }
    static reg zero() { return set1(0.0f); }
    static reg load(const float* p) { return vld1q_f32(p); }
    static reg load(const bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }
    template <class T>
    static reg load_tail(const T* p, int count) {
        T lanes[4] = {};
        std::memcpy(lanes, p, count * sizeof(T));
        return load(lanes);
    }
    static void store(float* p, reg v) { vst1q_f32(p, v); }
    static void store(bf16* p, reg v) {
        const uint32x4_t bits = vreinterpretq_u32_f32(v);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint16x4_t rounded = vshrn_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
        vst1_u16(&p->bits, vbsl_u16(vmovn_u32(vceqq_f32(v, v)), rounded, vdup_n_u16(0x7fc0)));
    }
    template <class T>
    static void store_tail(T* p, reg v, int count) {
        T lanes[4];
        store(lanes, v);
        std::memcpy(p, lanes, count * sizeof(T));
    }

    static reg add(reg a, reg b) { return vaddq_f32(a, b); }
    static reg sub(reg a, reg b) { return vsubq_f32(a, b); }
    static reg mul(reg a, reg b) { return vmulq_f32(a, b); }
    static reg div(reg a, reg b) { return vdivq_f32(a, b); }
    static reg fma(reg a, reg b, reg c) { return vfmaq_f32(c, a, b); }
    // As the x86 instructions: b where either is NaN.
    static reg min(reg a, reg b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
    static reg max(reg a, reg b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
    static reg select_greater(reg a, reg b, reg yes, reg no) { return vbslq_f32(vcgtq_f32(a, b), yes, no); }
    static reg abs(reg a) { return vabsq_f32(a); }
    static reg exp2_whole(reg n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23)); }
    static reg round(reg a) { return vrndnq_f32(a); }

    static float sum(reg v) {
        const reg pairs = vpaddq_f32(v, v);
        return vgetq_lane_f32(pairs, 0) + vgetq_lane_f32(pairs, 1);
    }
    static float highest(reg v) {
        const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
        return a > b ? a : b;
    }
    // Lane j of v[i] becomes lane i of v[j].
    static void transpose(reg (&v)[4]) {
        const reg a = vzip1q_f32(v[0], v[2]), b = vzip2q_f32(v[0], v[2]);
        const reg c = vzip1q_f32(v[1], v[3]), d = vzip2q_f32(v[1], v[3]);
        v[0] = vzip1q_f32(a, c);
        v[1] = vzip2q_f32(a, c);
        v[2] = vzip1q_f32(b, d);
        v[3] = vzip2q_f32(b, d);
    }
};

}  // namespace canter::neon
