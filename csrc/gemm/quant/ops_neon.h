// Panel-wide operations on four registers of NEON, with the dot products of bytes where the compiler may use them (CANTER_DOT).
//
// Without them products of codes and x are summed in 16 bits, each element of a group in a lane of its own: eight codes of five
// bits give at most 8 * 31 * 127 there, the four of six bits that share a scale 4 * 63 * 127 = 32004. Signed bytes would not
// fit: they are widened to 16 bits first, and summed in 32.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "gemm/quant/layout.h"

namespace canter::CANTER_ISA {

struct Ops {
    struct Codes {
        uint8x16_t v[4];
    };
    struct Ints {
        int32x4_t v[4];
    };
    struct Floats {
        float32x4_t v[4];
    };
#if defined(CANTER_DOT)
    using Sum = Ints;
    static constexpr bool kSplitsBytes = false, kSignedBytes = true;
    static constexpr int kHeldSums = 1, kFewRows = 4, kTileRows = 4, kTilePanels = 1;
    static constexpr int kStreams = 1, kAhead = 6144, kAheadOfTwo = 0, kLocality = 3;
#else
    struct Sum {
        int16x8_t v[8];
        std::int32_t start;
    };
    static constexpr bool kSplitsBytes = true;
    static constexpr int kHeldSums = 1, kFewRows = 1, kTileRows = 2, kTilePanels = 1;
    static constexpr int kStreams = 1, kAhead = 6144, kAheadOfTwo = 0, kLocality = 3;
#endif
    static constexpr bool kShortSums = false;  // what a sum starts at has 32 bits either way

    template <class T, class F>
    static T each(F f) {
        return {{f(0), f(1), f(2), f(3)}};
    }

    // Four codes of x in every lane.
    static int8x16_t word(const void* p) {
        std::int32_t value;
        std::memcpy(&value, p, sizeof value);
        return vreinterpretq_s8_s32(vdupq_n_s32(value));
    }

    static Codes load(const std::uint8_t* p) {
        return each<Codes>([&](int i) { return vld1q_u8(p + 16 * i); });
    }
    // Values that stay in their registers: the compiler would rather load codes again for every row.
    static Codes load_once(const std::uint8_t* p) {
        return each<Codes>([&](int i) {
            uint8x16_t v = vld1q_u8(p + 16 * i);
            asm("" : "+w"(v));
            return v;
        });
    }
    static void store(std::uint8_t* p, const Codes& c) {
        for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, c.v[i]);
    }
    static Codes unsigned_bytes(const std::uint8_t* p) { return load(p); }  // products are of signed bytes
    static void nibbles(const std::uint8_t* p, Codes& low, Codes& high) {
        const Codes c = load(p);
        low = each<Codes>([&](int i) { return vandq_u8(c.v[i], vdupq_n_u8(15)); });
        high = each<Codes>([&](int i) { return vshrq_n_u8(c.v[i], 4); });
    }
    template <int Left>
    static uint8x16_t shifted(uint8x16_t v) {
        if constexpr (Left > 0) return vshlq_n_u8(v, Left);
        else if constexpr (Left < 0) return vshrq_n_u8(v, -Left);
        else return v;
    }
    // The given bits from high << Left, the others from c.
    template <int Left>
    static Codes merged(const Codes& c, const Codes& high, std::uint8_t bits) {
        return each<Codes>([&](int i) { return vbslq_u8(vdupq_n_u8(bits), shifted<Left>(high.v[i]), c.v[i]); });
    }
    template <int G>
    static Codes fifth_bit(const Codes& c, const Codes& high) {
        return merged<4 - G>(c, high, 0x10);
    }
    template <int J>
    static Codes upper_bits(const Codes& c, const Codes& high) {
        return merged<4 - 2 * J>(c, high, 0x30);
    }

    static Ints zero_ints() {
        return each<Ints>([](int) { return vdupq_n_s32(0); });
    }
#if defined(CANTER_DOT)
    static Sum start(const std::int32_t* p) {
        return each<Sum>([&](int) { return vdupq_n_s32(*p); });
    }
    static Sum zero_sum() { return zero_ints(); }
    static Sum add(const Sum& sum, const Codes& c, const std::int8_t* p) {
        const int8x16_t x = word(p);
        return each<Sum>([&](int i) { return vdotq_s32(sum.v[i], vreinterpretq_s8_u8(c.v[i]), x); });
    }
    static Ints total(const Sum& sum) { return sum; }
    static void widen_row(const std::int8_t*, std::int16_t*) {}
#else
    static Sum start(const std::int32_t* p) {
        Sum sum;
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) sum.v[i] = vdupq_n_s16(0);
        sum.start = *p;
        return sum;
    }
    static Sum zero_sum() {
        const std::int32_t nothing = 0;
        return start(&nothing);
    }
    static Sum add(Sum sum, const Codes& c, const std::int8_t* p) {
        const int8x16_t x = word(p);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const int8x16_t code = vreinterpretq_s8_u8(c.v[i]);
            sum.v[2 * i] = vmlal_s8(sum.v[2 * i], vget_low_s8(code), vget_low_s8(x));
            sum.v[2 * i + 1] = vmlal_high_s8(sum.v[2 * i + 1], code, x);
        }
        return sum;
    }
    static Ints total(const Sum& sum) {
        return each<Ints>([&](int i) {
            return vaddq_s32(vpaddq_s32(vpaddlq_s16(sum.v[2 * i]), vpaddlq_s16(sum.v[2 * i + 1])), vdupq_n_s32(sum.start));
        });
    }

    // Bytes of four outputs by element: 0 and 2, then 1 and 3, so that one element of x meets four outputs.
    static int8x16_t by_element(uint8x16_t v) {
        constexpr uint8x16_t order = {0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15};
        return vreinterpretq_s8_u8(vqtbl1q_u8(v, order));
    }
    static Codes even_bytes(const Codes& c) {
        return each<Codes>([&](int i) { return vreinterpretq_u8_s16(vmovl_s8(vget_low_s8(by_element(c.v[i])))); });
    }
    static Codes odd_bytes(const Codes& c) {
        return each<Codes>([&](int i) { return vreinterpretq_u8_s16(vmovl_high_s8(by_element(c.v[i]))); });
    }
    static Ints add_wide(const Ints& sum, const Codes& c, const std::int16_t* p) {
        std::int32_t both;
        std::memcpy(&both, p, sizeof both);
        const int16x4_t x = vreinterpret_s16_s32(vdup_n_s32(both));
        return each<Ints>([&](int i) {
            const int16x8_t code = vreinterpretq_s16_u8(c.v[i]);
            return vmlal_high_lane_s16(vmlal_lane_s16(sum.v[i], vget_low_s16(code), x, 0), code, x, 1);
        });
    }
    // 0, 2 and 1, 3 of every four elements.
    static void widen_row(const std::int8_t* codes, std::int16_t* out) {
        constexpr uint8x16_t order = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
        for (int i = 0; i < 32; i += 16) {
            const int8x16_t v = vqtbl1q_s8(vld1q_s8(codes + i), order);
            vst1q_s16(out + i, vmovl_s8(vget_low_s8(v)));
            vst1q_s16(out + i + 8, vmovl_high_s8(v));
        }
    }
#endif
    // a - b * x.
    static Ints less_product(const Ints& a, const Ints& b, const std::int32_t* x) {
        return each<Ints>([&](int i) { return vmlsq_s32(a.v[i], b.v[i], vdupq_n_s32(*x)); });
    }

    static Floats to_floats(const Ints& a) {
        return each<Floats>([&](int i) { return vcvtq_f32_s32(a.v[i]); });
    }
    static Ints bytes_to_ints(const std::uint8_t* p) {
        const uint8x16_t v = vld1q_u8(p);
        const uint16x8_t low = vmovl_u8(vget_low_u8(v)), high = vmovl_high_u8(v);
        return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_high_u16(low)),
                 vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_high_u16(high))}};
    }
    static Floats bytes_to_floats(const std::uint8_t* p) { return to_floats(bytes_to_ints(p)); }
    static Floats signed_to_floats(const std::uint8_t* p) {
        const int8x16_t v = vreinterpretq_s8_u8(vld1q_u8(p));
        const int16x8_t low = vmovl_s8(vget_low_s8(v)), high = vmovl_high_s8(v);
        return to_floats({{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}});
    }
    static Floats halves_to_floats(const std::uint8_t* p) {
        return each<Floats>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
    }
    static Floats negate(const Floats& a) {
        return each<Floats>([&](int i) { return vnegq_f32(a.v[i]); });
    }
    static Floats mul(const Floats& a, const Floats& b) {
        return each<Floats>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
    }
    static Floats fma(const Floats& a, const Floats& b, const Floats& c) {
        return each<Floats>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
    }
    static Floats spread(const float* p) {
        return each<Floats>([&](int) { return vdupq_n_f32(*p); });
    }
    static Floats zero_floats() {
        return each<Floats>([](int) { return vdupq_n_f32(0.0f); });
    }
    static Floats load_floats(const float* p) {
        return each<Floats>([&](int i) { return vld1q_f32(p + 4 * i); });
    }
    static void store_floats(float* p, const Floats& a) {
        for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
    }
    static Ints load_ints(const std::uint8_t* p) {
        return each<Ints>([&](int i) { return vreinterpretq_s32_u8(vld1q_u8(p + 16 * i)); });
    }
    static void store_ints(std::uint8_t* p, const Ints& a) {
        for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, vreinterpretq_u8_s32(a.v[i]));
    }

    // The highest magnitude of a run, as the bits of a float.
    static std::int32_t highest_bits(const float* x) {
        uint32x4_t highest = vdupq_n_u32(0);
        for (int i = 0; i < 32; i += 4) highest = vmaxq_u32(highest, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + i))));
        return static_cast<std::int32_t>(vmaxvq_u32(highest));
    }

    static void widen_bf16(const bf16* x, float* out) {
        for (int i = 0; i < 32; i += 4) vst1q_f32(out + i, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&x[i].bits), 16)));
    }

    static void quantize_run(const float* x, float inverse, bool damaged, RowRun& out) {
        std::int32_t halves[2];
        for (int h = 0; h < 2; ++h) {
            // To the nearest whole number, ties to even.
            const auto whole = [&](int i) { return vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 16 * h + i), inverse)); };
            const int16x8_t low = vmovn_high_s32(vmovn_s32(whole(0)), whole(4)), high = vmovn_high_s32(vmovn_s32(whole(8)), whole(12));
            const int8x16_t codes = damaged ? vdupq_n_s8(0) : vmovn_high_s16(vmovn_s16(low), high);
            vst1q_s8(out.codes + 16 * h, codes);
            halves[h] = vaddlvq_s8(codes);
        }
        out.sum = halves[0] + halves[1];
        out.start8 = -8 * out.sum;
        out.start16 = -16 * out.sum;
        out.start32[0] = -32 * halves[0];
        out.start32[1] = -32 * halves[1];
    }
};

}  // namespace canter::CANTER_ISA
