// Integer lanes and comparisons beside isa/vec_scalar.h.
#pragma once

#include "isa/vec_scalar.h"

namespace canter::scalar {

struct Lanes {
    typedef Vec::ireg ireg;
    typedef Vec::ureg ureg;

    static ireg set1(std::int32_t x) { return ireg{x, x, x, x}; }
    static ireg load(const std::int32_t* p) {
        ireg v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static void store(std::int32_t* p, ireg a) { std::memcpy(p, &a, sizeof a); }
    static ireg exclusive_or(ireg a, ireg b) { return a ^ b; }
    static ireg add(ireg a, ireg b) { return ireg(ureg(a) + ureg(b)); }
    static ireg multiply(ireg a, ireg b) { return ireg(ureg(a) * ureg(b)); }
    template <int n>
    static ireg shift_right(ireg a) { return ireg(ureg(a) >> n); }
    template <int n>
    static ireg shift_right_signed(ireg a) { return a >> n; }
    static Vec::reg to_float(ireg a) { return __builtin_convertvector(a, Vec::reg); }
    static ireg truncate(Vec::reg a) { return __builtin_convertvector(a, ireg); }
    static ireg bits(Vec::reg a) { return ireg(a); }

    static unsigned mask(ireg m) { return (m[0] & 1u) | (m[1] & 2u) | (m[2] & 4u) | (m[3] & 8u); }
    static unsigned greater(Vec::reg a, Vec::reg b) { return mask(a > b); }
    static unsigned at_least(Vec::reg a, Vec::reg b) { return mask(a >= b); }
    static unsigned equal(Vec::reg a, Vec::reg b) { return mask(a == b); }
    static bool any_nan(Vec::reg a, Vec::reg b) { return mask((a != a) | (b != b)); }
    static bool any_set(ireg a) { return mask(ireg(a != 0)); }
};

}  // namespace canter::scalar
