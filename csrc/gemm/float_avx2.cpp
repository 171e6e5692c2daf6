// Eight lanes: AVX2 with FMA. Twelve sums, two weights and a broadcast fill the registers.
#include "gemm/float_table.h"
#include "isa/intrinsics.h"

namespace canter {
namespace {

struct Lanes {
    static constexpr int width = 8;
    static constexpr int max_rows = 6, few_rows = 6, block_panels = 1;
    static constexpr int stream_panels(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : rows == 3 ? 2 : 1; }

    using reg = __m256;
    using pairs = __m256i;

    static reg zero() { return _mm256_setzero_ps(); }
    static reg set1(float x) { return _mm256_set1_ps(x); }
    static reg load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, reg v) { _mm256_storeu_ps(p, v); }
    static reg load_bf16(const bf16* p) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    static void store_bf16(bf16* p, reg v) {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd_bit = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd_bit), 16);
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        const __m256i out = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(out, out), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    }
    static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
    static reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
    static void pin(reg& v) { asm volatile("" : "+x"(v)); }

    static pairs load_pairs(const std::uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
    static reg even(pairs p) { return _mm256_castsi256_ps(_mm256_slli_epi32(p, 16)); }
    static reg odd(pairs p) { return _mm256_castsi256_ps(_mm256_and_si256(p, _mm256_set1_epi32(static_cast<int>(0xffff0000)))); }
};

}  // namespace
}  // namespace canter

#include "gemm/float_kernel.h"

namespace canter {

const FloatKernels kAvx2FloatKernels = kFloatKernels;

}  // namespace canter
