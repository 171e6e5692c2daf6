// Elements of the cache as floats, with AVX-512. What a codec has: see codec_scalar.h.
#pragma once

#include "attention/attention.h"
#include "isa/vec_avx512.h"

namespace canter::avx512 {

struct CodecF32 {
    using Element = float;
    static constexpr int lanes = 1;
    static constexpr float factor = 1.0f;
    static constexpr int convert_rows = 24;
    using Raw = __m512;
    static Raw raw(const char* p) { return _mm512_loadu_ps(p); }
    template <int H>
    static __m512 get(Raw r) {
        return r;
    }
    static __m512 load(const Element* p) { return _mm512_loadu_ps(p); }
};

struct CodecBF16 {
    using Element = bf16;
    static constexpr int lanes = 2;
    static constexpr float factor = 1.0f;
    static constexpr int convert_rows = 24;
    using Raw = __m512i;
    static Raw raw(const char* p) { return _mm512_loadu_si512(p); }
    template <int H>
    static __m512 get(Raw r) {
        return _mm512_castsi512_ps(H == 0 ? _mm512_slli_epi32(r, 16) : _mm512_and_si512(r, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    static __m512 load(const Element* p) { return Vec::load(p); }
};

struct CodecF16 {
    using Element = f16;
    static constexpr int lanes = 2;
    static constexpr float factor = 1.0f;
    static constexpr int convert_rows = 24;
    struct Raw {
        __m256i first, second;  // elements 0 of each key, elements 1
    };
    static Raw raw(const char* p) {
        const __m512i turn = _mm512_set4_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100);
        const __m512i turned = _mm512_shuffle_epi8(_mm512_loadu_si512(p), turn);
        const __m512i places = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        const __m512i rows = _mm512_permutexvar_epi32(places, turned);
        return {_mm512_castsi512_si256(rows), _mm512_extracti64x4_epi64(rows, 1)};
    }
    template <int H>
    static __m512 get(const Raw& r) {
        return _mm512_cvtph_ps(H == 0 ? r.first : r.second);
    }
    static __m512 load(const Element* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static void store(Element* p, __m512 v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};

// As with AVX2: half floats of a 256th of the value, which the machine widens.
struct CodecFP8 {
    using Element = std::uint8_t;
    static constexpr int lanes = 4;
    static constexpr float factor = 256.0f;
    static constexpr int convert_rows = 5;
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
    static Raw raw(const char* p) {
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
    static __m512 load(const Element* p) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        __m256i size = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
        size = _mm256_or_si256(size, _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x3f80)));
        return _mm512_cvtph_ps(_mm256_or_si256(size, _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16(static_cast<short>(0x8000)))));
    }
};

struct CodecI8 {
    using Element = std::int8_t;
    static constexpr int lanes = 4;
    static constexpr float factor = 1.0f;
    static constexpr int convert_rows = 5;
    using Raw = __m512i;
    static Raw raw(const char* p) { return _mm512_loadu_si512(p); }
    template <int H>
    static __m512 get(Raw r) {
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(H == 3 ? r : _mm512_slli_epi32(r, 24 - 8 * H), 24));
    }
    static __m512 load(const Element* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
};

}  // namespace canter::avx512
