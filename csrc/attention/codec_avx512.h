// Elements of the cache as floats, with AVX-512. What a codec has: see codec_scalar.h.
#pragma once

#include "attention/cache_types.h"
#include "isa/vec_avx512.h"

namespace canter::avx512 {

struct CodecF32 : CacheF32 {
    template <int H>
    static __m512 key(const char* p, std::int64_t) {
        return load(reinterpret_cast<const float*>(p));
    }
    static __m512 load(const Element* p) { return _mm512_loadu_ps(p); }
};

struct CodecBF16 : CacheBF16 {
    static constexpr bool split = true;
    template <int H>
    static __m512 key(const char* p, std::int64_t) {
        return half<H>(_mm512_loadu_si512(p));
    }
    template <int H>
    static __m512 half(__m512i r) {
        return _mm512_castsi512_ps(H == 0 ? _mm512_slli_epi32(r, 16)
                                          : _mm512_and_si512(r, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    static void load_split(const Element* p, __m512& even, __m512& odd) {
        const __m512i r = _mm512_loadu_si512(p);
        even = half<0>(r);
        odd = half<1>(r);
    }
    static void part(__m512& a, __m512& b) {
        const __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512 even = _mm512_permutex2var_ps(a, places, b);
        b = _mm512_permutex2var_ps(a, _mm512_add_epi32(places, _mm512_set1_epi32(1)), b);
        a = even;
    }
    static void join(__m512& a, __m512& b) {
        const __m512i places = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const __m512 low = _mm512_permutex2var_ps(a, places, b);
        b = _mm512_permutex2var_ps(a, _mm512_add_epi32(places, _mm512_set1_epi32(8)), b);
        a = low;
    }
    static __m512 load(const Element* p) { return Vec::load(p); }
};

struct CodecF16 : CacheF16 {
    template <int H>
    static __m512 key(const char* p, std::int64_t row) {
        return load(reinterpret_cast<const Element*>(p + H * row));
    }
    static __m512 load(const Element* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static void store(Element* p, __m512 v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};

// As with AVX2: half floats of a 256th of the value, which the machine widens.
struct CodecFP8 : CacheFP8 {
    struct Raw {
        __m512i first, second;  // half floats of elements 0 and 1, 2 and 3
    };
    static __m512i halves(__m256i codes) {
        const __m512i wide = _mm512_cvtepu8_epi16(codes);
        const __m512i size = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(0x3f80));
        const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x3f80));
        const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(wide, 8), _mm512_set1_epi16(static_cast<short>(0x8000)));
        return _mm512_mask_mov_epi16(_mm512_or_si512(size, sign), is_nan, _mm512_set1_epi16(0x7fff));
    }
    __attribute__((always_inline)) static Raw raw(const char* p) {
        const __m512i turn = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
        const __m512i turned = _mm512_shuffle_epi8(_mm512_loadu_si512(p), turn);
        const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512i rows = _mm512_permutexvar_epi32(places, turned);
        return {halves(_mm512_castsi512_si256(rows)), halves(_mm512_extracti64x4_epi64(rows, 1))};
    }
    template <int H>
    static __m512 get(const Raw& r) {
        const __m512i pair = H < 2 ? r.first : r.second;
        return _mm512_cvtph_ps(H % 2 == 0 ? _mm512_castsi512_si256(pair) : _mm512_extracti64x4_epi64(pair, 1));
    }
    template <int H>
    static __m512 key(const char* p, std::int64_t) {
        return get<H>(raw(p));
    }
    static __m512 load(const Element* p) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        __m256i size = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
        size = _mm256_or_si256(size, _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x3f80)));
        return _mm512_cvtph_ps(
            _mm256_or_si256(size, _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16(static_cast<short>(0x8000)))));
    }
};

struct CodecI8 : CacheI8 {
    using Raw = __m512i;
    static Raw raw(const char* p) { return _mm512_loadu_si512(p); }
    template <int H>
    static __m512 get(Raw r) {
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(H == 3 ? r : _mm512_slli_epi32(r, 24 - 8 * H), 24));
    }
    template <int H>
    static __m512 key(const char* p, std::int64_t) {
        return get<H>(raw(p));
    }
    static __m512 load(const Element* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
};

}  // namespace canter::avx512
