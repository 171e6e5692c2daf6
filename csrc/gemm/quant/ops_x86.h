// What AVX2 and AVX-512 kernels share: 256-bit code that both may run. Included inside struct Ops.

// Sums of the codes of either half of a run from sums of neighbours: dwords of (0, 1), (2, 3) of every group, as 16 bits.
static __m128i fold_groups(__m256i pairs) {
    const __m256i twos = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0x4e));
    const __m256i ones = _mm256_add_epi16(twos, _mm256_shuffle_epi32(twos, 0xb1));
    // First the lower half's two sums, then the upper half's.
    return _mm_unpacklo_epi32(_mm256_castsi256_si128(ones), _mm256_extracti128_si256(ones, 1));
}

// The highest magnitude of a run, as the bits of a float.
static std::int32_t highest_bits(const float* x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    const auto bits = [&](int i) { return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 8 * i)), mask); };
    const __m256i all = _mm256_max_epi32(_mm256_max_epi32(bits(0), bits(1)), _mm256_max_epi32(bits(2), bits(3)));
    __m128i top = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1)));
}

static void widen_bf16(const bf16* x, float* out) {
    for (int i = 0; i < 32; i += 8) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i));
        _mm256_storeu_ps(out + i, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)));
    }
}

static void quantize_run(const float* x, float inverse, bool damaged, RowRun& out) {
    const __m256 factor = _mm256_set1_ps(inverse), round = _mm256_set1_ps(12582912.0f);
    const auto whole = [&](int i) {
        // Adding 1.5 * 2^23 rounds to the nearest whole number, ties to even; its low 16 bits are that of the number.
        const __m256 v = _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor), round);
        return _mm256_sub_epi32(_mm256_castps_si256(v), _mm256_castps_si256(round));
    };
    const __m256i low = _mm256_packs_epi32(whole(0), whole(1)), high = _mm256_packs_epi32(whole(2), whole(3));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    if (damaged) codes = _mm256_setzero_si256();
    _mm256_store_si256(reinterpret_cast<__m256i*>(out.codes), codes);
    const __m128i halves = fold_groups(_mm256_maddubs_epi16(_mm256_set1_epi8(1), codes));  // (h0: 01, 23), (h1: 01, 23), ...
    const __m128i whole_run = _mm_add_epi16(halves, _mm_shuffle_epi32(halves, 0xb1));
    const __m128i ones = _mm_set1_epi16(1);
    out.sum = _mm_cvtsi128_si32(_mm_madd_epi16(whole_run, ones));
    if constexpr (kShortSums) {
        const __m128i zero = _mm_setzero_si128();
        out.start8 = _mm_cvtsi128_si32(_mm_sub_epi16(zero, _mm_slli_epi16(whole_run, 3)));
        out.start16 = _mm_cvtsi128_si32(_mm_sub_epi16(zero, _mm_slli_epi16(whole_run, 4)));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out.start32), _mm_sub_epi16(zero, _mm_slli_epi16(halves, 5)));
        out.extra = 16 * out.sum;
    } else {
        out.start8 = -8 * out.sum;
        out.start16 = -16 * out.sum;
        const __m128i sums = _mm_madd_epi16(halves, ones);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out.start32), _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(sums, 5)));
    }
}
