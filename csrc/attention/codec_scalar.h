// Elements of the cache as floats, in portable code.
//
// A codec has: `lanes`, elements in 4 bytes; `convert_rows`, from how many rows on keys and values are made floats once instead of
// by every few rows anew; `factor`, by which its floats are too small (a power of two, made good once at
// the end); Raw, one register of keys with `lanes` elements of d each, and get<H>, the H-th of them; load(p), Vec::width
// elements in a row.
#pragma once

#include "attention/attention.h"
#include "isa/vec_scalar.h"

namespace canter::scalar {

// fp8_e4m3 without infinities, divided by 256 as the vectorised codecs leave it.
inline float fp8_float(std::uint8_t code) {
    const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80) << 24, size = code & 0x7f;
    float value;
    if (size == 0x7f) value = __builtin_nanf("");
    else if (size < 8) value = static_cast<float>(size) * 0x1p-17f;
    else {
        const std::uint32_t bits = (size << 20) + (112u << 23);
        std::memcpy(&value, &bits, sizeof value);
    }
    return sign ? -value : value;
}

struct CodecF32 {
    using Element = float;
    static constexpr int lanes = 1;
    static constexpr float factor = 1.0f;
    static constexpr int convert_rows = 24;
    using Raw = Vec::reg;
    static Raw raw(const char* p) { return Vec::load(reinterpret_cast<const float*>(p)); }
    template <int H>
    static Vec::reg get(const Raw& r) {
        return r;
    }
    static Vec::reg load(const Element* p) { return Vec::load(p); }
};

struct CodecBF16 {
    using Element = bf16;
    static constexpr int lanes = 2;
    static constexpr float factor = 1.0f;
    static constexpr int convert_rows = 24;
    using Raw = Vec::ureg;
    static Raw raw(const char* p) {
        Raw r;
        std::memcpy(&r, p, sizeof r);
        return r;
    }
    template <int H>
    static Vec::reg get(const Raw& r) {
        return Vec::reg(H == 0 ? r << 16 : r & 0xffff0000u);
    }
    static Vec::reg load(const Element* p) { return Vec::load(p); }
};

// Pairs of half floats as codes in 32-bit lanes.
struct CodecF16 {
    using Element = f16;
    static constexpr int lanes = 2;
    static constexpr float factor = 1.0f;
    static constexpr int convert_rows = 24;
    using Raw = Vec::ureg;
    static Raw raw(const char* p) { return CodecBF16::raw(p); }
    // Moved to where a float has its exponent, the 15 bits below the sign make 2^-112 of the value, denormals included.
    static Vec::reg widen(const Vec::ureg& code) {
        const Vec::ureg size = (code & 0x7fffu) << 13, special = Vec::ureg((code & 0x7fffu) >= 0x7c00u);
        const Vec::ureg value = Vec::ureg(Vec::reg(size) * Vec::set1(0x1p112f));
        return Vec::reg((special & (size | 0x7f800000u)) | (~special & value) | (code & 0x8000u) << 16);
    }
    template <int H>
    static Vec::reg get(const Raw& r) {
        return widen(H == 0 ? r & 0xffffu : r >> 16);
    }
    static Vec::reg load(const Element* p) { return widen(Vec::ureg{p[0].bits, p[1].bits, p[2].bits, p[3].bits}); }
    // To nearest even, for magnitudes up to 65504; NaN stays.
    static void store(Element* p, const Vec::reg& v) {
        const Vec::ureg size = Vec::ureg(v) & 0x7fffffffu;
        // The last place of a half is the step of the codes below 2^-14.
        const Vec::ureg below = Vec::ureg(Vec::reg(size) + Vec::set1(0.5f)) - 0x3f000000u;
        const Vec::ureg above = ((size + 0xfffu + ((size >> 13) & 1u)) >> 13) - (112u << 10);
        const Vec::ureg is_small = Vec::ureg(size < 0x38800000u), is_nan = Vec::ureg(v != v);
        const Vec::ureg found = (is_small & below) | (~is_small & above);
        const Vec::ureg code = (is_nan & 0x7e00u) | (~is_nan & found) | (Vec::ureg(v) >> 16 & 0x8000u);
        for (int i = 0; i < 4; ++i) p[i].bits = static_cast<std::uint16_t>(code[i]);
    }
};

struct CodecFP8 {
    using Element = std::uint8_t;
    static constexpr int lanes = 4;
    static constexpr float factor = 256.0f;
    static constexpr int convert_rows = 5;
    struct Raw {
        std::uint8_t bytes[16];
    };
    static Raw raw(const char* p) {
        Raw r;
        std::memcpy(&r, p, sizeof r);
        return r;
    }
    template <int H>
    static Vec::reg get(const Raw& r) {
        return Vec::reg{fp8_float(r.bytes[H]), fp8_float(r.bytes[4 + H]), fp8_float(r.bytes[8 + H]), fp8_float(r.bytes[12 + H])};
    }
    static Vec::reg load(const Element* p) { return Vec::reg{fp8_float(p[0]), fp8_float(p[1]), fp8_float(p[2]), fp8_float(p[3])}; }
};

struct CodecI8 {
    using Element = std::int8_t;
    static constexpr int lanes = 4;
    static constexpr float factor = 1.0f;
    static constexpr int convert_rows = 5;
    using Raw = Vec::ireg;
    static Raw raw(const char* p) {
        Raw r;
        std::memcpy(&r, p, sizeof r);
        return r;
    }
    template <int H>
    static Vec::reg get(const Raw& r) {
        return __builtin_convertvector(Vec::ireg(Vec::ureg(r) << (24 - 8 * H)) >> 24, Vec::reg);
    }
    static Vec::reg load(const Element* p) {
        return Vec::reg{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])};
    }
};

}  // namespace canter::scalar
