// Four lanes in portable vector types: the compiler maps them to what every machine of the architecture has.
#pragma once

#include <cstdint>
#include <cstring>

#include "common.h"

namespace canter::scalar {

struct Vec {
    static constexpr int width = 4;
    static constexpr int registers = 16;
    typedef float reg __attribute__((vector_size(16)));
    typedef std::int32_t ireg __attribute__((vector_size(16)));
    typedef std::uint32_t ureg __attribute__((vector_size(16)));

    static reg set1(float x) { return reg{x, x, x, x}; }
    static reg zero() { return set1(0.0f); }
    static reg load(const float* p) {
        reg v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static reg load(const bf16* p) {
        const ureg v = {p[0].bits, p[1].bits, p[2].bits, p[3].bits};
        return reg(v << 16);
    }
    template <class T>
    static reg load_tail(const T* p, int count) {
        T lanes[4] = {};
        std::memcpy(lanes, p, count * sizeof(T));
        return load(lanes);
    }
    static void store(float* p, reg v) { std::memcpy(p, &v, sizeof v); }
    static void store(bf16* p, reg v) {
        const ureg bits = ureg(v);
        const ureg rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const ureg is_nan = ureg(v != v);
        const ureg out = (is_nan & 0x7fc0u) | (~is_nan & rounded);
        for (int i = 0; i < 4; ++i) p[i].bits = static_cast<std::uint16_t>(out[i]);
    }
    template <class T>
    static void store_tail(T* p, reg v, int count) {
        T lanes[4];
        store(lanes, v);
        std::memcpy(p, lanes, count * sizeof(T));
    }

    static reg add(reg a, reg b) { return a + b; }
    static reg sub(reg a, reg b) { return a - b; }
    static reg mul(reg a, reg b) { return a * b; }
    static reg div(reg a, reg b) { return a / b; }
    static reg fma(reg a, reg b, reg c) { return a * b + c; }
    // As the x86 instructions: b where either is NaN.
    static reg min(reg a, reg b) { return a < b ? a : b; }
    static reg max(reg a, reg b) { return a > b ? a : b; }
    static reg select_greater(reg a, reg b, reg yes, reg no) { return a > b ? yes : no; }
    static reg abs(reg a) { return reg(ureg(a) & 0x7fffffffu); }
    // 2^n for whole n in [-126, 127].
    static reg exp2_whole(reg n) { return reg((__builtin_convertvector(n, ireg) + 127) << 23); }
    // Nearest whole number, for |a| < 2^22.
    static reg round(reg a) {
        const reg shift = set1(12582912.0f);  // 1.5 * 2^23: pushes the fraction out of the significand
        return (a + shift) - shift;
    }

    static float sum(reg v) { return (v[0] + v[1]) + (v[2] + v[3]); }
    static float highest(reg v) {
        const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
        return a > b ? a : b;
    }
    // Lane j of v[i] becomes lane i of v[j].
    static void transpose(reg (&v)[4]) {
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < i; ++j) {
                const float x = v[i][j];
                v[i][j] = v[j][i];
                v[j][i] = x;
            }
        }
    }
};

}  // namespace canter::scalar
