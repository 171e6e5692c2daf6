// Sixteen lanes: AVX-512 F, BW, VL, DQ.
#pragma once

#include <cstdint>

#include "common.h"
#include "isa/intrinsics.h"

namespace canter::avx512 {

struct Vec {
    static constexpr int width = 16;
    static constexpr int registers = 32;
    using reg = __m512;

    static __mmask16 first(int count) { return static_cast<__mmask16>((1u << count) - 1); }

    static reg set1(float x) { return _mm512_set1_ps(x); }
    static reg zero() { return _mm512_setzero_ps(); }
    static reg widen(__m256i half) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)); }
    static reg load(const float* p) { return _mm512_loadu_ps(p); }
    static reg load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static reg load_tail(const float* p, int count) { return _mm512_maskz_loadu_ps(first(count), p); }
    static reg load_tail(const bf16* p, int count) { return widen(_mm256_maskz_loadu_epi16(first(count), p)); }
    static __m256i narrow(reg v) {
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0)));
    }
    static void store(float* p, reg v) { _mm512_storeu_ps(p, v); }
    static void store(bf16* p, reg v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }
    static void store_tail(float* p, reg v, int count) { _mm512_mask_storeu_ps(p, first(count), v); }
    static void store_tail(bf16* p, reg v, int count) { _mm256_mask_storeu_epi16(p, first(count), narrow(v)); }

    static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
    static reg sub(reg a, reg b) { return _mm512_sub_ps(a, b); }
    static reg mul(reg a, reg b) { return _mm512_mul_ps(a, b); }
    static reg div(reg a, reg b) { return _mm512_div_ps(a, b); }
    static reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
    static reg min(reg a, reg b) { return _mm512_min_ps(a, b); }
    static reg max(reg a, reg b) { return _mm512_max_ps(a, b); }
    static reg select_greater(reg a, reg b, reg yes, reg no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), no, yes); }
    static reg abs(reg a) { return _mm512_abs_ps(a); }
    static reg exp2_whole(reg n) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
    }
    static reg round(reg a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

    static __m256 fold(reg v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }
    static float sum(reg v) {
        const __m256 half = fold(v);
        const __m256 pairs = _mm256_hadd_ps(half, half);
        const __m256 fours = _mm256_hadd_ps(pairs, pairs);
        return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
    }
    static float highest(reg v) { return _mm512_reduce_max_ps(v); }
    // Lane j of v[i] becomes lane i of v[j].
    static void transpose(reg (&v)[16]) {
        reg fours[16];  // of every four registers, each four lanes turned
        for (int i = 0; i < 16; i += 4) {
            const reg a = _mm512_unpacklo_ps(v[i], v[i + 1]), b = _mm512_unpackhi_ps(v[i], v[i + 1]);
            const reg c = _mm512_unpacklo_ps(v[i + 2], v[i + 3]), d = _mm512_unpackhi_ps(v[i + 2], v[i + 3]);
            fours[i] = _mm512_shuffle_ps(a, c, 0x44);
            fours[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
            fours[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
            fours[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            const reg p = fours[i], q = fours[i + 4], r = fours[i + 8], s = fours[i + 12];
            const reg a = _mm512_shuffle_f32x4(p, q, 0x88), b = _mm512_shuffle_f32x4(p, q, 0xdd);
            const reg c = _mm512_shuffle_f32x4(r, s, 0x88), d = _mm512_shuffle_f32x4(r, s, 0xdd);
            v[i] = _mm512_shuffle_f32x4(a, c, 0x88);
            v[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
            v[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
            v[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
        }
    }
};

}  // namespace canter::avx512
