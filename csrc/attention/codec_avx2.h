// Elements of the cache as floats, with AVX2 and F16C. What a codec has: see codec_scalar.h.
#pragma once

#include "attention/cache_types.h"
#include "isa/vec_avx2.h"

namespace canter::avx2 {

struct CodecF32 : CacheF32 {
    template <int H>
    static __m256 key(const char* p, std::int64_t) {
        return load(reinterpret_cast<const float*>(p));
    }
    static __m256 load(const Element* p) { return _mm256_loadu_ps(p); }
};

struct CodecBF16 : CacheBF16 {
    static constexpr bool split = true;
    // Odd elements are shifted, not masked: a mask would take a register from the sums.
    template <int H>
    static __m256 key(const char* p, std::int64_t) {
        const __m256i r = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(H == 0 ? r : _mm256_srli_epi32(r, 16), 16));
    }
    static void load_split(const Element* p, __m256& even, __m256& odd) {
        const __m256i r = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        even = _mm256_castsi256_ps(_mm256_slli_epi32(r, 16));
        odd = _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    static void part(__m256& a, __m256& b) {
        const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88)), odd = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xdd));
        a = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
        b = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
    }
    static void join(__m256& a, __m256& b) {
        const __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
        a = _mm256_permute2f128_ps(low, high, 0x20);
        b = _mm256_permute2f128_ps(low, high, 0x31);
    }
    static __m256 load(const Element* p) { return Vec::load(p); }
};

struct CodecF16 : CacheF16 {
    template <int H>
    static __m256 key(const char* p, std::int64_t row) {
        return load(reinterpret_cast<const Element*>(p + H * row));
    }
    static __m256 load(const Element* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static void store(Element* p, __m256 v) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
};

// The seven bits below the sign, put where a half float has its exponent and significand, make a 256th of the value, and the
// machine widens half floats by itself.
struct CodecFP8 : CacheFP8 {
    struct Raw {
        __m256i first, second;  // half floats of elements 0 and 1, 2 and 3
    };
    static __m256i halves(__m128i codes) {
        const __m256i wide = _mm256_cvtepu8_epi16(codes);
        __m256i size = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
        size = _mm256_or_si256(size, _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x3f80)));  // NaN stays
        return _mm256_or_si256(size, _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16(static_cast<short>(0x8000))));
    }
    __attribute__((always_inline)) static Raw raw(const char* p) {
        const __m256i turn =
            _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m256i turned = _mm256_shuffle_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), turn);
        const __m256i rows = _mm256_permutevar8x32_epi32(turned, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        return {halves(_mm256_castsi256_si128(rows)), halves(_mm256_extracti128_si256(rows, 1))};
    }
    template <int H>
    static __m256 get(const Raw& r) {
        const __m256i pair = H < 2 ? r.first : r.second;
        return _mm256_cvtph_ps(H % 2 == 0 ? _mm256_castsi256_si128(pair) : _mm256_extracti128_si256(pair, 1));
    }
    template <int H>
    static __m256 key(const char* p, std::int64_t) {
        return get<H>(raw(p));
    }
    static __m256 load(const Element* p) {
        const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        __m128i size = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0x3f80));
        size = _mm_or_si128(size, _mm_cmpeq_epi16(size, _mm_set1_epi16(0x3f80)));
        return _mm256_cvtph_ps(_mm_or_si128(size, _mm_and_si128(_mm_slli_epi16(wide, 8), _mm_set1_epi16(static_cast<short>(0x8000)))));
    }
};

struct CodecI8 : CacheI8 {
    using Raw = __m256i;
    static Raw raw(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    template <int H>
    static __m256 get(Raw r) {
        return _mm256_cvtepi32_ps(_mm256_srai_epi32(H == 3 ? r : _mm256_slli_epi32(r, 24 - 8 * H), 24));
    }
    template <int H>
    static __m256 key(const char* p, std::int64_t) {
        return get<H>(raw(p));
    }
    static __m256 load(const Element* p) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    }
};

}  // namespace canter::avx2
