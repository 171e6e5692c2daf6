// The loops of all levels of AVX-512. Included once per level, with CANTER_ISA defined.

#include <immintrin.h>

#include "bench/limits.h"

namespace canter::CANTER_ISA {

using Reg = __m512i;

inline Reg zero() { return _mm512_setzero_si512(); }
inline Reg load(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
inline Reg join(Reg a, Reg b) { return _mm512_or_si512(a, b); }
inline std::uint64_t fold(Reg a) {
    alignas(64) std::uint64_t words[8];
    _mm512_store_si512(words, a);
    return words[0] | words[1] | words[2] | words[3] | words[4] | words[5] | words[6] | words[7];
}

}  // namespace canter::CANTER_ISA

#include "bench/read_kernel.h"

namespace canter::CANTER_ISA {

// As many independent sums as hide the latency of an instruction; the empty asm keeps each round's work.
constexpr int kSums = 24;

inline void fma_f32(std::int64_t rounds) {
    __m512 sums[kSums], a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(1.0f);
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_setzero_ps();
    for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < kSums; ++i) {
            sums[i] = _mm512_fmadd_ps(sums[i], a, b);
            asm volatile("" : "+v"(sums[i]));
        }
    }
}

inline void dot_int8(std::int64_t rounds) {
    __m512i sums[kSums], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-2);
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_setzero_si512();
#if !defined(__AVX512VNNI__)
    const __m512i ones = _mm512_set1_epi16(1);
#endif
    for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < kSums; ++i) {
#if defined(__AVX512VNNI__)
            sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
            asm volatile("" : "+v"(sums[i]));
#else
            __m512i pairs = _mm512_maddubs_epi16(a, b);
            asm volatile("" : "+v"(pairs));  // or the compiler would multiply once for all sums
            sums[i] = _mm512_add_epi32(sums[i], _mm512_madd_epi16(pairs, ones));
            asm volatile("" : "+v"(sums[i]), "+v"(a));
#endif
        }
    }
}

#if defined(__AVX512BF16__)
inline void dot_bf16(std::int64_t rounds) {
    __m512 sums[kSums];
    const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(-0.5f));
    const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1.0f), _mm512_set1_ps(1.0f));
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_setzero_ps();
    for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < kSums; ++i) {
            sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
            asm volatile("" : "+v"(sums[i]));
        }
    }
}
#endif

}  // namespace canter::CANTER_ISA
