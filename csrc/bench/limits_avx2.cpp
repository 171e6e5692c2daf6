#include <immintrin.h>

#include "bench/limits.h"

#define CANTER_ISA avx2

namespace canter::avx2 {

using Reg = __m256i;

inline Reg zero() { return _mm256_setzero_si256(); }
inline Reg load(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Reg join(Reg a, Reg b) { return _mm256_or_si256(a, b); }
inline std::uint64_t fold(Reg a) {
    alignas(32) std::uint64_t words[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), a);
    return words[0] | words[1] | words[2] | words[3];
}

}  // namespace canter::avx2

#include "bench/read_kernel.h"

namespace canter::avx2 {

// As many independent sums as hide the latency of an instruction; the empty asm keeps each round's work.
constexpr int kSums = 12;

void fma_f32(std::int64_t rounds) {
    __m256 sums[kSums], a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(1.0f);
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = _mm256_setzero_ps();
    for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) {
            sums[i] = _mm256_fmadd_ps(sums[i], a, b);
            asm volatile("" : "+x"(sums[i]));
        }
    }
}

void dot_int8(std::int64_t rounds) {
    __m256i sums[kSums], a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(-2);
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = _mm256_setzero_si256();
    for (std::int64_t round = 0; round < rounds; ++round) {
        asm volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) {
            __m256i pairs = _mm256_maddubs_epi16(a, b);
            asm volatile("" : "+x"(pairs));  // or the compiler would multiply once for all sums
            sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, ones));
            asm volatile("" : "+x"(sums[i]), "+x"(a));
        }
    }
}

}  // namespace canter::avx2

namespace canter {

const LimitKernels kAvx2Limits = {avx2::read_streams, avx2::fma_f32, nullptr, avx2::dot_int8, avx2::kSums * 8 * 2, 0, avx2::kSums * 32 * 2};

}  // namespace canter
