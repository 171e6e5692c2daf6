// Sixteen lanes: a panel is as wide as a register. For the files of AVX-512, each of which keeps its own copy.
#pragma once

#include "gemm/float_table.h"
#include "isa/intrinsics.h"

namespace canter {
namespace {

struct Lanes512 {
    static constexpr int width = 16;
    static constexpr int max_rows = 12, few_rows = 8, block_panels = 2;
    static constexpr int stream_panels(int rows) { return rows == 1 ? 8 : rows <= 4 ? 4 : 2; }

    using reg = __m512;
    using pairs = __m512i;

    static reg zero() { return _mm512_setzero_ps(); }
    static reg set1(float x) { return _mm512_set1_ps(x); }
    static reg load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, reg v) { _mm512_storeu_ps(p, v); }
    static reg load_bf16(const bf16* p) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    static void store_bf16(bf16* p, reg v) {
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i odd_bit = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd_bit), 16);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        const __m512i out = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(out));
    }
    static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
    static reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
#if defined(CANTER_SIMDE)
    static void pin(reg&) {}  // emulated: no register holds it
#else
    static void pin(reg& v) { asm volatile("" : "+v"(v)); }
#endif

    static pairs load_pairs(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
    static reg even(pairs p) { return _mm512_castsi512_ps(_mm512_slli_epi32(p, 16)); }
    static reg odd(pairs p) { return _mm512_castsi512_ps(_mm512_and_si512(p, _mm512_set1_epi32(static_cast<int>(0xffff0000)))); }
};

}  // namespace
}  // namespace canter
