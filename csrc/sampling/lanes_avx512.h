// Integer lanes and comparisons beside isa/vec_avx512.h.
#pragma once

#include "isa/vec_avx512.h"

namespace canter::avx512 {

struct Lanes {
    using ireg = __m512i;

    static ireg set1(std::int32_t x) { return _mm512_set1_epi32(x); }
    static ireg load(const std::int32_t* p) { return _mm512_loadu_si512(p); }
    static void store(std::int32_t* p, ireg a) { _mm512_storeu_si512(p, a); }
    static ireg exclusive_or(ireg a, ireg b) { return _mm512_xor_si512(a, b); }
    static ireg add(ireg a, ireg b) { return _mm512_add_epi32(a, b); }
    static ireg multiply(ireg a, ireg b) { return _mm512_mullo_epi32(a, b); }
    template <int n>
    static ireg shift_right(ireg a) { return _mm512_srli_epi32(a, n); }
    template <int n>
    static ireg shift_right_signed(ireg a) { return _mm512_srai_epi32(a, n); }
    static Vec::reg to_float(ireg a) { return _mm512_cvtepi32_ps(a); }
    static ireg truncate(Vec::reg a) { return _mm512_cvttps_epi32(a); }
    static ireg bits(Vec::reg a) { return _mm512_castps_si512(a); }

    static unsigned greater(Vec::reg a, Vec::reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
    static unsigned at_least(Vec::reg a, Vec::reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
    static unsigned equal(Vec::reg a, Vec::reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
    static bool any_nan(Vec::reg a, Vec::reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0; }
    static bool any_set(ireg a) { return _mm512_test_epi32_mask(a, a) != 0; }
};

}  // namespace canter::avx512
