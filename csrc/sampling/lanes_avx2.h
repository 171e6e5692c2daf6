// Integer lanes and comparisons beside isa/vec_avx2.h.
#pragma once

#include "isa/vec_avx2.h"

namespace canter::avx2 {

struct Lanes {
    using ireg = __m256i;

    static ireg set1(std::int32_t x) { return _mm256_set1_epi32(x); }
    static ireg load(const std::int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store(std::int32_t* p, ireg a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
    static ireg exclusive_or(ireg a, ireg b) { return _mm256_xor_si256(a, b); }
    static ireg add(ireg a, ireg b) { return _mm256_add_epi32(a, b); }
    static ireg multiply(ireg a, ireg b) { return _mm256_mullo_epi32(a, b); }
    template <int n>
    static ireg shift_right(ireg a) { return _mm256_srli_epi32(a, n); }
    template <int n>
    static ireg shift_right_signed(ireg a) { return _mm256_srai_epi32(a, n); }
    static Vec::reg to_float(ireg a) { return _mm256_cvtepi32_ps(a); }
    static ireg truncate(Vec::reg a) { return _mm256_cvttps_epi32(a); }
    static ireg bits(Vec::reg a) { return _mm256_castps_si256(a); }

    static unsigned mask(Vec::reg m) { return static_cast<unsigned>(_mm256_movemask_ps(m)); }
    static unsigned greater(Vec::reg a, Vec::reg b) { return mask(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
    static unsigned at_least(Vec::reg a, Vec::reg b) { return mask(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
    static unsigned equal(Vec::reg a, Vec::reg b) { return mask(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
    static bool any_nan(Vec::reg a, Vec::reg b) { return mask(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0; }
    static bool any_set(ireg a) { return !_mm256_testz_si256(a, a); }
};

}  // namespace canter::avx2
