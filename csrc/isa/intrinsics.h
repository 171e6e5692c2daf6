// The x86 intrinsics. Where CANTER_SIMDE is defined, those that the machine lacks are emulated: for trying kernels out on
// machines that can't run them.
#pragma once

#if defined(CANTER_SIMDE)
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <immintrin.h>
#include <simde/x86/avx512.h>
// What the emulation lacks or, in some versions, spells wrongly. From the 256-bit halves, which run as they are.
namespace canter::emulated {
template <class Wide, class Half>
inline Wide joined(Half low, Half high) {
    const Half halves[2] = {low, high};
    Wide out;
    __builtin_memcpy(&out, halves, sizeof out);
    return out;
}
template <class Half, class Wide>
inline Half half_of(Wide v, int i) {
    Half halves[2];
    __builtin_memcpy(halves, &v, sizeof halves);
    return halves[i];
}
inline simde__m512 cvtepi32_ps(simde__m512i v) {
    return joined<simde__m512>(_mm256_cvtepi32_ps(half_of<__m256i>(v, 0)), _mm256_cvtepi32_ps(half_of<__m256i>(v, 1)));
}
inline simde__m512 cvtph_ps(__m256i v) {
    return joined<simde__m512>(_mm256_cvtph_ps(half_of<__m128i>(v, 0)), _mm256_cvtph_ps(half_of<__m128i>(v, 1)));
}
inline simde__m512i cvtepu8_epi32(__m128i v) { return joined<simde__m512i>(_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))); }
inline simde__m512i cvtepi8_epi32(__m128i v) { return joined<simde__m512i>(_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))); }
}  // namespace canter::emulated
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#define _mm512_cvtepi32_ps canter::emulated::cvtepi32_ps
#define _mm512_cvtph_ps canter::emulated::cvtph_ps
#define _mm512_cvtepu8_epi32 canter::emulated::cvtepu8_epi32
#define _mm512_cvtepi8_epi32 canter::emulated::cvtepi8_epi32
#else
#include <immintrin.h>
#endif
