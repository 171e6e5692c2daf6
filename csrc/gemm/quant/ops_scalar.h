// Panel-wide operations in portable vector types: the compiler maps them to what every machine of the architecture has.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm/quant/layout.h"

// Vectors wider than the machine's are passed between functions of this directory only, which are compiled alike.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace canter::scalar {

struct Ops {
    typedef std::uint32_t Codes __attribute__((vector_size(64)));  // four codes a lane, the first lowest
    typedef std::int32_t Ints __attribute__((vector_size(64)));
    typedef float Floats __attribute__((vector_size(64)));
    using Sum = Ints;
    static constexpr bool kSplitsBytes = false, kShortSums = false;
    static constexpr int kHeldSums = 1, kFewRows = 1, kTileRows = 2, kTilePanels = 1;
    static constexpr int kStreams = 1, kAhead = 6144, kAheadOfTwo = 0, kLocality = 3;

    template <class V>
    static V read(const void* p) {
        V out;
        std::memcpy(&out, p, sizeof out);
        return out;
    }
    template <class V, class E>
    static V widened(const std::uint8_t* p) {
        V out;
        for (int i = 0; i < 16; ++i) out[i] = static_cast<E>(p[i]);
        return out;
    }

    static Codes load(const std::uint8_t* p) { return read<Codes>(p); }
    static Codes load_once(const std::uint8_t* p) { return load(p); }
    static void store(std::uint8_t* p, Codes c) { std::memcpy(p, &c, sizeof c); }
    static Codes unsigned_bytes(const std::uint8_t* p) { return load(p) ^ 0x80808080u; }
    static void nibbles(const std::uint8_t* p, Codes& low, Codes& high) {
        const Codes c = load(p);
        low = c & 0x0f0f0f0fu;
        high = c >> 4 & 0x0f0f0f0fu;
    }
    template <int G>
    static Codes fifth_bit(Codes c, Codes high) {
        return c | (high >> G & 0x01010101u) << 4;
    }
    template <int J>
    static Codes upper_bits(Codes c, Codes high) {
        return c | (high >> 2 * J & 0x03030303u) << 4;
    }

    static Ints spread(const std::int32_t* p) { return *p - Ints{}; }
    static Sum start(const std::int32_t* p) { return spread(p); }
    static Sum zero_sum() { return Ints{}; }
    static Sum add(Sum sum, Codes c, const std::int8_t* x) {
        for (int i = 0; i < 4; ++i) sum += Ints(c >> 8 * i & 255u) * x[i];
        return sum;
    }
    static Ints total(Sum sum) { return sum; }
    static Ints less_product(Ints a, Ints b, const std::int32_t* x) { return a - b * *x; }

    static Floats to_floats(Ints a) { return __builtin_convertvector(a, Floats); }
    static Ints bytes_to_ints(const std::uint8_t* p) { return widened<Ints, std::uint8_t>(p); }
    static Floats bytes_to_floats(const std::uint8_t* p) { return to_floats(bytes_to_ints(p)); }
    static Floats signed_to_floats(const std::uint8_t* p) { return to_floats(widened<Ints, std::int8_t>(p)); }
    static Floats halves_to_floats(const std::uint8_t* p) {
        std::uint16_t halves[16];
        std::memcpy(halves, p, sizeof halves);
        Codes h;
        for (int i = 0; i < 16; ++i) h[i] = halves[i];
        const Codes sign = (h & 0x8000u) << 16, magnitude = (h & 0x7fffu) << 13;
        // A scale by 2^112 turns the exponent's bias of 15 into 127 and makes subnormals normal.
        const Codes value = Codes(Floats(magnitude) * 0x1p112f), special = Codes(magnitude >= 0x0f800000u);
        return Floats(sign | (special & (magnitude + 0x70000000u)) | (~special & value));
    }
    static Floats negate(Floats a) { return -a; }
    static Floats mul(Floats a, Floats b) { return a * b; }
    static Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
    static Floats spread(const float* p) {
        Floats out;
        for (int i = 0; i < 16; ++i) out[i] = *p;
        return out;
    }
    static Floats zero_floats() { return Floats{}; }
    static Floats load_floats(const float* p) { return read<Floats>(p); }
    static void store_floats(float* p, Floats a) { std::memcpy(p, &a, sizeof a); }
    static Ints load_ints(const std::uint8_t* p) { return read<Ints>(p); }
    static void store_ints(std::uint8_t* p, Ints a) { std::memcpy(p, &a, sizeof a); }

    static void widen_row(const std::int8_t*, std::int16_t*) {}

    static std::int32_t highest_bits(const float* x) {
        std::int32_t highest = 0;
        for (int i = 0; i < 32; ++i) {
            const std::int32_t bits = __builtin_bit_cast(std::int32_t, x[i]) & 0x7fffffff;
            highest = bits > highest ? bits : highest;
        }
        return highest;
    }

    static void widen_bf16(const bf16* x, float* out) {
        for (int i = 0; i < 32; ++i) out[i] = __builtin_bit_cast(float, static_cast<std::uint32_t>(x[i].bits) << 16);
    }

    static void quantize_run(const float* x, float inverse, bool damaged, RowRun& out) {
        std::int32_t halves[2] = {};
        for (int i = 0; i < 32; ++i) {
            // Adding 1.5 * 2^23 rounds to the nearest whole number, ties to even.
            const int code = damaged ? 0 : __builtin_bit_cast(std::int32_t, x[i] * inverse + 12582912.0f) - 0x4b400000;
            out.codes[i] = static_cast<std::int8_t>(code);
            halves[i / 16] += code;
        }
        out.sum = halves[0] + halves[1];
        out.start8 = -8 * out.sum;
        out.start16 = -16 * out.sum;
        out.start32[0] = -32 * halves[0];
        out.start32[1] = -32 * halves[1];
    }
};

}  // namespace canter::scalar
