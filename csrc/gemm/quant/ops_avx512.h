// Panel-wide operations on one register of AVX-512, with VNNI where the compiler may use it. Without VNNI sums work as on
// AVX2; with it every product sum has 32 bits, and signed bytes are codes with an offset of 128.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm/quant/layout.h"
#include "isa/intrinsics.h"

namespace canter::CANTER_ISA {

struct Ops {
    struct Codes {
        __m512i v;
    };
    using Ints = Codes;
    using Sum = Codes;
    struct Floats {
        __m512 v;
    };
#if defined(CANTER_VNNI)
    static constexpr bool kSplitsBytes = false, kShortSums = false;
#else
    static constexpr bool kSplitsBytes = true, kShortSums = true;
#endif
    static constexpr int kHeldSums = 12, kFewRows = 4, kTileRows = 6, kTilePanels = 2;
    static constexpr int kStreams = 1, kAhead = 6144, kAheadOfTwo = 0, kLocality = 3;

    static __m512i word(const void* p) {
        std::int32_t value;
        std::memcpy(&value, p, sizeof value);
        return _mm512_set1_epi32(value);
    }

    // A value that stays in its register. Left to itself, the compiler adds the products up in trees, runs out of registers
    // and then loads codes again for every row.
    static __m512i kept(__m512i v) {
#if !defined(CANTER_SIMDE)
        asm("" : "+v"(v));
#endif
        return v;
    }

    static Codes load(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }
    static Codes load_once(const std::uint8_t* p) { return {kept(load(p).v)}; }
    static void store(std::uint8_t* p, const Codes& c) { _mm512_storeu_si512(p, c.v); }
    static Codes unsigned_bytes(const std::uint8_t* p) {
        if constexpr (kSplitsBytes) return load(p);
        else return {_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128))};
    }
    static void nibbles(const std::uint8_t* p, Codes& low, Codes& high) {
        const __m512i c = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
        low.v = _mm512_and_si512(c, mask);
        high.v = _mm512_and_si512(_mm512_srli_epi16(c, 4), mask);
    }
    template <int Left>
    static __m512i shifted(__m512i v) {
        if constexpr (Left > 0) return _mm512_slli_epi16(v, Left);
        else if constexpr (Left < 0) return _mm512_srli_epi16(v, -Left);
        else return v;
    }
    // c | (high << Left & bits), in one operation after the shift.
    template <int Left>
    static Codes merged(const Codes& c, const Codes& high, int bits) {
        return {_mm512_ternarylogic_epi32(c.v, shifted<Left>(high.v), _mm512_set1_epi8(static_cast<char>(bits)), 0xf8)};
    }
    template <int G>
    static Codes fifth_bit(const Codes& c, const Codes& high) {
        return merged<4 - G>(c, high, 0x10);
    }
    template <int J>
    static Codes upper_bits(const Codes& c, const Codes& high) {
        return merged<4 - 2 * J>(c, high, 0x30);
    }

    static Codes even_bytes(const Codes& c) { return {_mm512_srai_epi16(_mm512_slli_epi16(c.v, 8), 8)}; }
    static Codes odd_bytes(const Codes& c) { return {_mm512_srai_epi16(c.v, 8)}; }
    static Ints zero_ints() { return {_mm512_setzero_si512()}; }
    static Ints add_wide(const Ints& sum, const Codes& c, const std::int16_t* x) {
        return {kept(_mm512_add_epi32(sum.v, _mm512_madd_epi16(c.v, word(x))))};
    }

    static Sum start(const std::int32_t* p) { return {word(p)}; }
    static Sum zero_sum() { return zero_ints(); }
#if defined(CANTER_VNNI)
    static Sum add(Sum sum, const Codes& c, const std::int8_t* x) { return {_mm512_dpbusd_epi32(sum.v, c.v, word(x))}; }
    static Ints total(const Sum& sum) { return sum; }
#else
    static Sum add(Sum sum, const Codes& c, const std::int8_t* x) {
        return {kept(_mm512_add_epi16(sum.v, _mm512_maddubs_epi16(c.v, word(x))))};
    }
    static Ints total(const Sum& sum) { return {_mm512_madd_epi16(sum.v, _mm512_set1_epi16(1))}; }
#endif
    static Ints add_spread(const Ints& a, const std::int32_t* p) { return {_mm512_add_epi32(a.v, word(p))}; }
    // a - b * x, for b in [0, 255] and |x| < 2^15.
    static Ints less_product(const Ints& a, const Ints& b, const std::int32_t* x) {
        return {_mm512_sub_epi32(a.v, _mm512_madd_epi16(b.v, word(x)))};
    }

    static Floats to_floats(const Ints& a) { return {_mm512_cvtepi32_ps(a.v)}; }
    static __m128i sixteen(const std::uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
    static Ints bytes_to_ints(const std::uint8_t* p) { return {_mm512_cvtepu8_epi32(sixteen(p))}; }
    static Floats bytes_to_floats(const std::uint8_t* p) { return to_floats(bytes_to_ints(p)); }
    static Floats signed_to_floats(const std::uint8_t* p) { return to_floats({_mm512_cvtepi8_epi32(sixteen(p))}); }
    static Floats halves_to_floats(const std::uint8_t* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static Floats negate(const Floats& a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
    static Floats mul(const Floats& a, const Floats& b) { return {_mm512_mul_ps(a.v, b.v)}; }
    static Floats fma(const Floats& a, const Floats& b, const Floats& c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
    static Floats spread(const float* p) { return {_mm512_set1_ps(*p)}; }
    static Floats zero_floats() { return {_mm512_setzero_ps()}; }
    static Floats load_floats(const float* p) { return {_mm512_loadu_ps(p)}; }
    static void store_floats(float* p, const Floats& a) { _mm512_storeu_ps(p, a.v); }
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

}  // namespace canter::CANTER_ISA
