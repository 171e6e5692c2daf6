// Elements of the cache as floats, in portable code.
//
// A codec is its type of cache (cache_types.h) and has: key<H>(p, row), the H-th element of a step of Vec::width keys, where elements
// that do not lie together are `row` bytes apart; load(p), Vec::width elements in a row; where `split`, load_split(p, even, odd), and
// part and join, which change two registers of elements in a row into even and odd ones and back; for float16, store(p, v).
#pragma once

#include "attention/cache_types.h"
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

struct CodecF32 : CacheF32 {
    template <int H>
    static Vec::reg key(const char* p, std::int64_t) {
        return load(reinterpret_cast<const float*>(p));
    }
    static Vec::reg load(const Element* p) { return Vec::load(p); }
};

struct CodecBF16 : CacheBF16 {
    template <int H>
    static Vec::reg key(const char* p, std::int64_t) {
        Vec::ureg r;
        std::memcpy(&r, p, sizeof r);
        return Vec::reg(H == 0 ? r << 16 : r & 0xffff0000u);
    }
    static Vec::reg load(const Element* p) { return Vec::load(p); }
};

struct CodecF16 : CacheF16 {
    // Moved to where a float has its exponent, the 15 bits below the sign make 2^-112 of the value, denormals included.
    static Vec::reg widen(const Vec::ureg& code) {
        const Vec::ureg size = (code & 0x7fffu) << 13, special = Vec::ureg((code & 0x7fffu) >= 0x7c00u);
        const Vec::ureg value = Vec::ureg(Vec::reg(size) * Vec::set1(0x1p112f));
        return Vec::reg((special & (size | 0x7f800000u)) | (~special & value) | (code & 0x8000u) << 16);
    }
    template <int H>
    static Vec::reg key(const char* p, std::int64_t row) {
        std::uint16_t codes[4];
        std::memcpy(codes, p + H * row, sizeof codes);
        return widen(Vec::ureg{codes[0], codes[1], codes[2], codes[3]});
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

struct CodecFP8 : CacheFP8 {
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
    template <int H>
    static Vec::reg key(const char* p, std::int64_t) {
        return get<H>(raw(p));
    }
    static Vec::reg load(const Element* p) { return Vec::reg{fp8_float(p[0]), fp8_float(p[1]), fp8_float(p[2]), fp8_float(p[3])}; }
};

struct CodecI8 : CacheI8 {
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
    template <int H>
    static Vec::reg key(const char* p, std::int64_t) {
        return get<H>(raw(p));
    }
    static Vec::reg load(const Element* p) {
        return Vec::reg{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])};
    }
};

}  // namespace canter::scalar
