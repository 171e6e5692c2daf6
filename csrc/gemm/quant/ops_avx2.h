// Panel-wide operations on two registers of AVX2.
//
// Products of unsigned codes and signed x are summed in 16 bits over a whole scale (vpmaddubsw, vpaddw) and widened once.
// They fit: 32 codes of four bits give at most 16 * 15 * 127 a lane; those of five bits less 16, and 16 elements of six bits
// less 32, at most 16 * 16 * 127 = 8 * 32 * 127 = 32512, whatever wraps around on the way. Signed bytes would not fit even
// two to a lane, and vpmaddubsw saturates: they are widened to 16 bits first, by shifts, even and odd elements apart.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm/quant/layout.h"
#include "isa/intrinsics.h"

namespace canter::avx2 {

struct Ops {
    struct Codes {
        __m256i v[2];
    };
    using Ints = Codes;
    using Sum = Codes;
    struct Floats {
        __m256 v[2];
    };
    static constexpr bool kSplitsBytes = true, kShortSums = true;
    static constexpr int kHeldSums = 2, kFewRows = 4, kTileRows = 4, kTilePanels = 1;
    // Weights of one row pass by once: they are asked for past the second cache.
    static constexpr int kStreams = 2, kAhead = 2048, kAheadOfTwo = 1024, kLocality = 0;

    static __m256i word(const void* p) {
        std::int32_t value;
        std::memcpy(&value, p, sizeof value);
        return _mm256_set1_epi32(value);
    }

    // A value that stays in its register: the compiler would rather load codes again for every row.
    static __m256i kept(__m256i v) {
        asm("" : "+x"(v));
        return v;
    }
    // Sums in place. Left to itself, the compiler adds the products up in trees and runs out of registers.
    static void add_words(__m256i& sum, __m256i v) { asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(v)); }
    static void add_dwords(__m256i& sum, __m256i v) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(v)); }

    static Codes load(const std::uint8_t* p) {
        return {{_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))}};
    }
    static Codes load_once(const std::uint8_t* p) {
        const Codes c = load(p);
        return {{kept(c.v[0]), kept(c.v[1])}};
    }
    static void store(std::uint8_t* p, const Codes& c) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), c.v[0]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), c.v[1]);
    }
    static Codes unsigned_bytes(const std::uint8_t* p) { return load(p); }
    static void nibbles(const std::uint8_t* p, Codes& low, Codes& high) {
        const Codes c = load(p);
        const __m256i mask = _mm256_set1_epi8(15);
        for (int i = 0; i < 2; ++i) {
            low.v[i] = _mm256_and_si256(c.v[i], mask);
            high.v[i] = _mm256_and_si256(_mm256_srli_epi16(c.v[i], 4), mask);
        }
    }
    template <int Left>
    static __m256i shifted(__m256i v) {
        if constexpr (Left > 0) return _mm256_slli_epi16(v, Left);
        else if constexpr (Left < 0) return _mm256_srli_epi16(v, -Left);
        else return v;
    }
    template <int Left>
    static Codes merged(const Codes& c, const Codes& high, int bits) {
        const __m256i mask = _mm256_set1_epi8(static_cast<char>(bits));
        Codes out;
        for (int i = 0; i < 2; ++i) out.v[i] = _mm256_or_si256(c.v[i], _mm256_and_si256(shifted<Left>(high.v[i]), mask));
        return out;
    }
    template <int G>
    static Codes fifth_bit(const Codes& c, const Codes& high) {
        return merged<4 - G>(c, high, 0x10);
    }
    template <int J>
    static Codes upper_bits(const Codes& c, const Codes& high) {
        return merged<4 - 2 * J>(c, high, 0x30);
    }

    static Codes even_bytes(const Codes& c) {
        return {{_mm256_srai_epi16(_mm256_slli_epi16(c.v[0], 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(c.v[1], 8), 8)}};
    }
    static Codes odd_bytes(const Codes& c) { return {{_mm256_srai_epi16(c.v[0], 8), _mm256_srai_epi16(c.v[1], 8)}}; }
    static Ints zero_ints() { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
    static Ints add_wide(Ints sum, const Codes& c, const std::int16_t* p) {
        const __m256i x = word(p);
        for (int i = 0; i < 2; ++i) add_dwords(sum.v[i], _mm256_madd_epi16(c.v[i], x));
        return sum;
    }

    static Sum start(const std::int32_t* p) {
        const __m256i value = word(p);
        return {{value, value}};
    }
    static Sum zero_sum() { return zero_ints(); }
    static Sum add(Sum sum, const Codes& c, const std::int8_t* p) {
        const __m256i x = word(p);
        for (int i = 0; i < 2; ++i) add_words(sum.v[i], _mm256_maddubs_epi16(c.v[i], x));
        return sum;
    }
    static Ints total(const Sum& sum) {
        const __m256i ones = _mm256_set1_epi16(1);
        return {{_mm256_madd_epi16(sum.v[0], ones), _mm256_madd_epi16(sum.v[1], ones)}};
    }
    static Ints add_spread(const Ints& a, const std::int32_t* p) {
        const __m256i value = word(p);
        return {{_mm256_add_epi32(a.v[0], value), _mm256_add_epi32(a.v[1], value)}};
    }
    // a - b * x, for b in [0, 255] and |x| < 2^15.
    static Ints less_product(const Ints& a, const Ints& b, const std::int32_t* x) {
        const __m256i value = word(x);
        return {{_mm256_sub_epi32(a.v[0], _mm256_madd_epi16(b.v[0], value)), _mm256_sub_epi32(a.v[1], _mm256_madd_epi16(b.v[1], value))}};
    }

    static Floats to_floats(const Ints& a) { return {{_mm256_cvtepi32_ps(a.v[0]), _mm256_cvtepi32_ps(a.v[1])}}; }
    static __m128i eight(const std::uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
    static Ints bytes_to_ints(const std::uint8_t* p) { return {{_mm256_cvtepu8_epi32(eight(p)), _mm256_cvtepu8_epi32(eight(p + 8))}}; }
    static Floats bytes_to_floats(const std::uint8_t* p) { return to_floats(bytes_to_ints(p)); }
    static Floats signed_to_floats(const std::uint8_t* p) {
        return to_floats({{_mm256_cvtepi8_epi32(eight(p)), _mm256_cvtepi8_epi32(eight(p + 8))}});
    }
    static Floats halves_to_floats(const std::uint8_t* p) {
        const auto* halves = reinterpret_cast<const __m128i*>(p);
        return {{_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))}};
    }
    static Floats negate(const Floats& a) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        return {{_mm256_xor_ps(a.v[0], sign), _mm256_xor_ps(a.v[1], sign)}};
    }
    static Floats mul(const Floats& a, const Floats& b) { return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}}; }
    static Floats fma(const Floats& a, const Floats& b, const Floats& c) {
        return {{_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])}};
    }
    static Floats spread(const float* p) { return {{_mm256_set1_ps(*p), _mm256_set1_ps(*p)}}; }
    static Floats zero_floats() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }
    static Floats load_floats(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
    static void store_floats(float* p, const Floats& a) {
        _mm256_storeu_ps(p, a.v[0]);
        _mm256_storeu_ps(p + 8, a.v[1]);
    }
    static Ints load_ints(const std::uint8_t* p) { return load(p); }
    static void store_ints(std::uint8_t* p, const Ints& a) { store(p, a); }

    static void widen_row(const std::int8_t* codes, std::int16_t* out) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), odd = _mm256_srai_epi16(v, 8);
        const __m256i first = _mm256_unpacklo_epi32(even, odd), second = _mm256_unpackhi_epi32(even, odd);
        auto* place = reinterpret_cast<__m256i*>(out);
        _mm256_storeu_si256(place, _mm256_permute2x128_si256(first, second, 0x20));
        _mm256_storeu_si256(place + 1, _mm256_permute2x128_si256(first, second, 0x31));
    }

#include "gemm/quant/ops_x86.h"
};

}  // namespace canter::avx2
