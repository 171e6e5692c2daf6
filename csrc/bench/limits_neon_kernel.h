// The loops of NEON. Included once per level, with CANTER_ISA defined.

#include <arm_neon.h>

#include "bench/limits.h"

namespace canter::CANTER_ISA {

using Reg = uint8x16_t;

inline Reg zero() { return vdupq_n_u8(0); }
inline Reg load(const std::uint8_t* p) { return vld1q_u8(p); }
inline Reg join(Reg a, Reg b) { return vorrq_u8(a, b); }
inline std::uint64_t fold(Reg a) { return vgetq_lane_u64(vreinterpretq_u64_u8(a), 0) | vgetq_lane_u64(vreinterpretq_u64_u8(a), 1); }

}  // namespace canter::CANTER_ISA

#include "bench/read_kernel.h"

namespace canter::CANTER_ISA {

// As many independent sums as hide the latency of an instruction; the empty asm keeps each round's work.
constexpr int kSums = 24;

inline void fma_f32(std::int64_t rounds) {
    float32x4_t sums[kSums];
    const float32x4_t a = vdupq_n_f32(0.5f), b = vdupq_n_f32(1.0f);
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = vdupq_n_f32(0.0f);
    for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < kSums; ++i) {
            sums[i] = vfmaq_f32(sums[i], a, b);
            asm volatile("" : "+w"(sums[i]));
        }
    }
}

inline void dot_int8(std::int64_t rounds) {
    const int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(-2);
#if defined(__ARM_FEATURE_DOTPROD)
    int32x4_t sums[kSums];
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = vdupq_n_s32(0);
#else
    int16x8_t sums[kSums];
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = vdupq_n_s16(0);
#endif
    for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < kSums; ++i) {
#if defined(__ARM_FEATURE_DOTPROD)
            sums[i] = vdotq_s32(sums[i], a, b);
#else
            sums[i] = i % 2 == 0 ? vmlal_s8(sums[i], vget_low_s8(a), vget_low_s8(b)) : vmlal_high_s8(sums[i], a, b);
#endif
            asm volatile("" : "+w"(sums[i]));
        }
    }
}

#if defined(__ARM_FEATURE_DOTPROD)
constexpr int kProducts = 16;
#else
constexpr int kProducts = 8;
#endif

}  // namespace canter::CANTER_ISA
