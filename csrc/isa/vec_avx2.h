// Eight lanes: AVX2 with FMA.
#pragma once

#include "isa/intrinsics.h"

#include <cstdint>
#include <cstring>

#include "common.h"

namespace canter::avx2 {

struct Vec {
    static constexpr int width = 8;
    static constexpr int registers = 16;
    using reg = __m256;

    static reg set1(float x) { return _mm256_set1_ps(x); }
    static reg zero() { return _mm256_setzero_ps(); }
    static reg load(const float* p) { return _mm256_loadu_ps(p); }
    static reg load(const bf16* p) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    template <class T>
    static reg load_tail(const T* p, int count) {
        T lanes[8] = {};
        std::memcpy(lanes, p, count * sizeof(T));
        return load(lanes);
    }
    static void store(float* p, reg v) { _mm256_storeu_ps(p, v); }
    static void store(bf16* p, reg v) {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        const __m256i out = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(out, out), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    }
    template <class T>
    static void store_tail(T* p, reg v, int count) {
        T lanes[8];
        store(lanes, v);
        std::memcpy(p, lanes, count * sizeof(T));
    }

    static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
    static reg sub(reg a, reg b) { return _mm256_sub_ps(a, b); }
    static reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
    static reg div(reg a, reg b) { return _mm256_div_ps(a, b); }
    static reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
    static reg min(reg a, reg b) { return _mm256_min_ps(a, b); }
    static reg max(reg a, reg b) { return _mm256_max_ps(a, b); }
    static reg select_greater(reg a, reg b, reg yes, reg no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
    static reg abs(reg a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
    static reg exp2_whole(reg n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
    }
    static reg round(reg a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

    static float sum(reg v) {
        const reg pairs = _mm256_hadd_ps(v, v);
        const reg fours = _mm256_hadd_ps(pairs, pairs);
        return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
    }
    static float highest(reg v) {
        __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        m = _mm_max_ps(m, _mm_movehl_ps(m, m));
        return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
    }
    // Lane j of v[i] becomes lane i of v[j].
    static void transpose(reg (&v)[8]) {
        reg fours[8];  // lanes 0 to 3 of v[0] to v[3] turned, and so lanes 4 to 7; then those of v[4] to v[7]
        for (int i = 0; i < 8; i += 4) {
            const reg a = _mm256_unpacklo_ps(v[i], v[i + 1]), b = _mm256_unpackhi_ps(v[i], v[i + 1]);
            const reg c = _mm256_unpacklo_ps(v[i + 2], v[i + 3]), d = _mm256_unpackhi_ps(v[i + 2], v[i + 3]);
            fours[i] = _mm256_shuffle_ps(a, c, 0x44);
            fours[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
            fours[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
            fours[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            v[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
            v[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
        }
    }
};

}  // namespace canter::avx2
