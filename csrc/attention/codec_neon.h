// Elements of the cache as floats, with NEON. What a codec has: see codec_scalar.h.
#pragma once

#include "attention/cache_types.h"
#include "isa/vec_neon.h"

namespace canter::neon {

struct CodecF32 : CacheF32 {
    template <int H>
    static float32x4_t key(const char* p, std::int64_t) {
        return load(reinterpret_cast<const float*>(p));
    }
    static float32x4_t load(const Element* p) { return vld1q_f32(p); }
};

struct CodecBF16 : CacheBF16 {
    template <int H>
    static float32x4_t key(const char* p, std::int64_t) {
        const uint32x4_t r = vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(p)));
        return vreinterpretq_f32_u32(H == 0 ? vshlq_n_u32(r, 16) : vandq_u32(r, vdupq_n_u32(0xffff0000u)));
    }
    static float32x4_t load(const Element* p) { return Vec::load(p); }
};

struct CodecF16 : CacheF16 {
    template <int H>
    static float32x4_t key(const char* p, std::int64_t row) {
        return load(reinterpret_cast<const Element*>(p + H * row));
    }
    static float32x4_t load(const Element* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
    static void store(Element* p, float32x4_t v) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
};

// As with AVX2: half floats of a 256th of the value, which the machine widens.
struct CodecFP8 : CacheFP8 {
    struct Raw {
        uint16x8_t first, second;  // half floats of elements 0 and 1, 2 and 3
    };
    static __attribute__((always_inline)) uint16x8_t halves(uint8x8_t codes) {
        const int16x8_t moved = vshrq_n_s16(vreinterpretq_s16_u16(vshll_n_u8(codes, 8)), 1);  // the sign lies there twice
        const uint16x8_t bits = vandq_u16(vreinterpretq_u16_s16(moved), vdupq_n_u16(0xbf80));
        return vorrq_u16(bits, vceqq_u16(vorrq_u16(bits, vdupq_n_u16(0x8000)), vdupq_n_u16(0xbf80)));  // NaN stays
    }
    static __attribute__((always_inline)) Raw raw(const char* p) {
        constexpr uint8x16_t turn = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
        const uint8x16_t turned = vqtbl1q_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(p)), turn);
        return {halves(vget_low_u8(turned)), halves(vget_high_u8(turned))};
    }
    template <int H>
    static float32x4_t get(const Raw& r) {
        const uint16x8_t pair = H < 2 ? r.first : r.second;
        return vcvt_f32_f16(vreinterpret_f16_u16(H % 2 == 0 ? vget_low_u16(pair) : vget_high_u16(pair)));
    }
    template <int H>
    static float32x4_t key(const char* p, std::int64_t) {
        return get<H>(raw(p));
    }
    static float32x4_t load(const Element* p) {
        std::uint32_t codes;
        std::memcpy(&codes, p, sizeof codes);
        return vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(halves(vreinterpret_u8_u32(vdup_n_u32(codes))))));
    }
};

struct CodecI8 : CacheI8 {
    using Raw = int32x4_t;
    static Raw raw(const char* p) { return vreinterpretq_s32_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(p))); }
    template <int H>
    static float32x4_t get(Raw r) {
        return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(r, 24 - 8 * H), 24));
    }
    template <int H>
    static float32x4_t key(const char* p, std::int64_t) {
        return get<H>(raw(p));
    }
    static float32x4_t load(const Element* p) {
        std::int32_t codes;
        std::memcpy(&codes, p, sizeof codes);
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(codes))))));
    }
};

}  // namespace canter::neon
