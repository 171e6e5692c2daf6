// AVX-512 for machines without it, for tests: SIMDe's emulation, and here what the SIMDe of current distributions lacks.
//
// Meanings are those of Intel's manual (Software Developer's Manual, volume 2). Masked loads and stores touch only the
// lanes of their mask, as the instructions do, so that a sanitizer sees exactly the accesses of real hardware. A missing
// intrinsic shows as "target specific option mismatch" when a kernel is compiled: add it here.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cstdint>
#include <cstring>

namespace canter::emulated {

template <class To, class From>
inline To cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// A register as an array of its lanes.
template <class Lane, class Reg>
struct Lanes {
    static constexpr int count = sizeof(Reg) / sizeof(Lane);
    Lane at[count];
    Lanes() = default;
    explicit Lanes(Reg reg) { std::memcpy(at, &reg, sizeof reg); }
    Reg reg() const { return cast<Reg>(*this); }
};

inline __m256i low(__m512i v) { return _mm512_castsi512_si256(v); }
inline __m256i high(__m512i v) { return _mm512_extracti64x4_epi64(v, 1); }
inline __m256 low(__m512 v) { return _mm256_castsi256_ps(low(_mm512_castps_si512(v))); }
inline __m256 high(__m512 v) { return _mm256_castsi256_ps(high(_mm512_castps_si512(v))); }
inline __m512i join(__m256i a, __m256i b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }
inline __m512 join(__m256 a, __m256 b) { return _mm512_castsi512_ps(join(_mm256_castps_si256(a), _mm256_castps_si256(b))); }

template <class Lane, class Reg, class Mask>
inline Reg load(Reg otherwise, Mask mask, const void* p) {
    Lanes<Lane, Reg> lanes(otherwise);
    for (int i = 0; i < lanes.count; ++i) {
        if (mask >> i & 1) std::memcpy(&lanes.at[i], static_cast<const Lane*>(p) + i, sizeof(Lane));
    }
    return lanes.reg();
}

template <class Lane, class Mask, class Reg>
inline void store(void* p, Mask mask, Reg v) {
    const Lanes<Lane, Reg> lanes(v);
    for (int i = 0; i < lanes.count; ++i) {
        if (mask >> i & 1) std::memcpy(static_cast<Lane*>(p) + i, &lanes.at[i], sizeof(Lane));
    }
}

// Each lane of `from` turned into one of To; lanes without a source are zero.
template <class ToReg, class ToLane, class FromLane, class FromReg, class F>
inline ToReg convert(FromReg from, F f) {
    const Lanes<FromLane, FromReg> source(from);
    Lanes<ToLane, ToReg> out(ToReg{});
    for (int i = 0; i < out.count && i < source.count; ++i) out.at[i] = f(source.at[i]);
    return out.reg();
}

template <class ToReg, class ToLane, class FromLane, class FromReg>
inline ToReg truncate(FromReg from) {
    return convert<ToReg, ToLane, FromLane>(from, [](FromLane x) { return static_cast<ToLane>(x); });
}

template <class ToReg, class ToLane, class FromReg>
inline ToReg saturate(FromReg from) {
    constexpr std::int32_t least = sizeof(ToLane) == 1 ? -128 : -32768;
    return convert<ToReg, ToLane, std::int32_t>(from, [](std::int32_t x) {
        return static_cast<ToLane>(x < least ? least : x > -1 - least ? -1 - least : x);
    });
}

template <class Lane, class Reg, class F>
inline auto reduce(Reg v, F f) {
    Lanes<Lane, Reg> lanes(v);
    for (int n = lanes.count / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; ++i) lanes.at[i] = f(lanes.at[i], lanes.at[i + n]);
    }
    return lanes.at[0];
}

inline float flush(float x) { return x > -1.17549435e-38f && x < 1.17549435e-38f ? __builtin_copysignf(0.0f, x) : x; }
inline float widen(std::uint16_t bits) { return cast<float>(static_cast<std::uint32_t>(bits) << 16); }

// VCVTNEPS2BF16: to nearest even; denormals count as zero; a NaN keeps its upper bits and becomes quiet.
inline std::uint16_t narrow(float x) {
    const auto bits = cast<std::uint32_t>(flush(x));
    if (x != x) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// VDPBF16PS: the even element's product, then the odd one's; a product of two bf16 is exact in float32. Denormals are zero.
template <class Reg, class Pairs>
inline Reg dot_bf16(Reg sum, Pairs a, Pairs b) {
    Lanes<float, Reg> sums(sum);
    const Lanes<std::uint16_t, Pairs> x(a), y(b);
    for (int i = 0; i < sums.count; ++i) {
        float total = flush(sums.at[i]);
        for (int j = 2 * i; j < 2 * i + 2; ++j) total = flush(__builtin_fmaf(flush(widen(x.at[j])), flush(widen(y.at[j])), total));
        sums.at[i] = total;
    }
    return sums.reg();
}

// VPDPBUSD (VPDPBUSDS with saturation): four products of unsigned and signed bytes, added exactly.
template <bool Saturate, class Reg>
inline Reg dot_bytes(Reg sum, Reg a, Reg b) {
    Lanes<std::int32_t, Reg> sums(sum);
    const Lanes<std::uint8_t, Reg> x(a);
    const Lanes<std::int8_t, Reg> y(b);
    for (int i = 0; i < sums.count; ++i) {
        std::int64_t total = sums.at[i];
        for (int j = 4 * i; j < 4 * i + 4; ++j) total += static_cast<std::int64_t>(x.at[j]) * y.at[j];
        if (Saturate) total = total > INT32_MAX ? INT32_MAX : total < INT32_MIN ? INT32_MIN : total;
        sums.at[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(total));
    }
    return sums.reg();
}

// Within each 128 bits.
template <class Reg, class F>
inline Reg each_quarter(Reg v, F f) {
    Lanes<__m128i, Reg> quarters(v);
    for (auto& quarter : quarters.at) quarter = f(quarter);
    return quarters.reg();
}

inline __m512i shuffle_quarters(__m512i a, __m512i b, int order) {
    const Lanes<__m128i, __m512i> x(a), y(b);
    Lanes<__m128i, __m512i> out;
    for (int i = 0; i < 4; ++i) out.at[i] = (i < 2 ? x : y).at[order >> (2 * i) & 3];
    return out.reg();
}

template <class Mask, class Lane, class Reg, class F>
inline Mask compare(Reg a, Reg b, F f) {
    const Lanes<Lane, Reg> x(a), y(b);
    Mask mask = 0;
    for (int i = 0; i < x.count; ++i) mask |= static_cast<Mask>(f(x.at[i], y.at[i]) ? Mask{1} << i : Mask{0});
    return mask;
}

template <class Reg, class Index>
inline Reg gather(Index index, const void* base, int scale) {
    const Lanes<std::int32_t, Index> indices(index);
    Lanes<std::int32_t, Reg> out;
    for (int i = 0; i < out.count; ++i) {
        std::memcpy(&out.at[i], static_cast<const char*>(base) + static_cast<std::int64_t>(indices.at[i]) * scale, 4);
    }
    return out.reg();
}

}  // namespace canter::emulated

// Loads and stores under a mask.
#define CANTER_MASKED(bits, reg, suffix, lane)                                                                                 \
    namespace canter::emulated {                                                                                               \
    template <class Mask>                                                                                                      \
    inline reg maskz_loadu_##bits##_##suffix(Mask mask, const void* p) { return load<lane>(reg{}, mask, p); }                   \
    template <class Mask>                                                                                                      \
    inline reg mask_loadu_##bits##_##suffix(reg v, Mask mask, const void* p) { return load<lane>(v, mask, p); }                 \
    template <class Mask>                                                                                                      \
    inline void mask_storeu_##bits##_##suffix(void* p, Mask mask, reg v) { store<lane>(p, mask, v); }                           \
    }
CANTER_MASKED(128, __m128, ps, float)
CANTER_MASKED(128, __m128i, epi8, std::uint8_t)
CANTER_MASKED(128, __m128i, epi16, std::uint16_t)
CANTER_MASKED(128, __m128i, epi32, std::uint32_t)
CANTER_MASKED(256, __m256, ps, float)
CANTER_MASKED(256, __m256i, epi8, std::uint8_t)
CANTER_MASKED(256, __m256i, epi16, std::uint16_t)
CANTER_MASKED(256, __m256i, epi32, std::uint32_t)
CANTER_MASKED(512, __m512, ps, float)
CANTER_MASKED(512, __m512i, epi8, std::uint8_t)
CANTER_MASKED(512, __m512i, epi16, std::uint16_t)
CANTER_MASKED(512, __m512i, epi32, std::uint32_t)
#undef CANTER_MASKED

#define _mm_maskz_loadu_ps canter::emulated::maskz_loadu_128_ps
#define _mm_maskz_loadu_epi8 canter::emulated::maskz_loadu_128_epi8
#define _mm_maskz_loadu_epi16 canter::emulated::maskz_loadu_128_epi16
#define _mm_maskz_loadu_epi32 canter::emulated::maskz_loadu_128_epi32
#define _mm256_maskz_loadu_ps canter::emulated::maskz_loadu_256_ps
#define _mm256_maskz_loadu_epi8 canter::emulated::maskz_loadu_256_epi8
#define _mm256_maskz_loadu_epi16 canter::emulated::maskz_loadu_256_epi16
#define _mm256_maskz_loadu_epi32 canter::emulated::maskz_loadu_256_epi32
#define _mm512_maskz_loadu_ps canter::emulated::maskz_loadu_512_ps
#define _mm512_maskz_loadu_epi8 canter::emulated::maskz_loadu_512_epi8
#define _mm512_maskz_loadu_epi16 canter::emulated::maskz_loadu_512_epi16
#define _mm512_maskz_loadu_epi32 canter::emulated::maskz_loadu_512_epi32
#define _mm512_mask_loadu_ps canter::emulated::mask_loadu_512_ps
#define _mm512_mask_loadu_epi32 canter::emulated::mask_loadu_512_epi32
#define _mm_mask_storeu_ps canter::emulated::mask_storeu_128_ps
#define _mm_mask_storeu_epi8 canter::emulated::mask_storeu_128_epi8
#define _mm_mask_storeu_epi16 canter::emulated::mask_storeu_128_epi16
#define _mm_mask_storeu_epi32 canter::emulated::mask_storeu_128_epi32
#define _mm256_mask_storeu_ps canter::emulated::mask_storeu_256_ps
#define _mm256_mask_storeu_epi8 canter::emulated::mask_storeu_256_epi8
#define _mm256_mask_storeu_epi16 canter::emulated::mask_storeu_256_epi16
#define _mm256_mask_storeu_epi32 canter::emulated::mask_storeu_256_epi32
#define _mm512_mask_storeu_ps canter::emulated::mask_storeu_512_ps
#define _mm512_mask_storeu_epi8 canter::emulated::mask_storeu_512_epi8
#define _mm512_mask_storeu_epi16 canter::emulated::mask_storeu_512_epi16
#define _mm512_mask_storeu_epi32 canter::emulated::mask_storeu_512_epi32

// Conversions. Those between registers of one size are AVX2's, on halves.
#define _mm512_cvtepu8_epi16(v) (canter::emulated::convert<__m512i, std::uint16_t, std::uint8_t>((__m256i)(v), [](auto x) { return x; }))
#define _mm512_cvtepu8_epi32(v) (canter::emulated::convert<__m512i, std::int32_t, std::uint8_t>((__m128i)(v), [](auto x) { return x; }))
#define _mm512_cvtepi8_epi32(v) (canter::emulated::convert<__m512i, std::int32_t, std::int8_t>((__m128i)(v), [](auto x) { return x; }))
#define _mm512_cvtepu16_epi32(v) (canter::emulated::convert<__m512i, std::int32_t, std::uint16_t>((__m256i)(v), [](auto x) { return x; }))
#define _mm512_cvtepi16_epi32(v) (canter::emulated::convert<__m512i, std::int32_t, std::int16_t>((__m256i)(v), [](auto x) { return x; }))
#define _mm512_cvtepi32_epi16(v) (canter::emulated::truncate<__m256i, std::uint16_t, std::uint32_t>((__m512i)(v)))
#define _mm512_cvtepi32_epi8(v) (canter::emulated::truncate<__m128i, std::uint8_t, std::uint32_t>((__m512i)(v)))
#define _mm256_cvtepi32_epi16(v) (canter::emulated::truncate<__m128i, std::uint16_t, std::uint32_t>((__m256i)(v)))
#define _mm256_cvtepi32_epi8(v) (canter::emulated::truncate<__m128i, std::uint8_t, std::uint32_t>((__m256i)(v)))
#define _mm256_cvtepi16_epi8(v) (canter::emulated::truncate<__m128i, std::uint8_t, std::uint16_t>((__m256i)(v)))
#undef _mm512_cvtsepi32_epi8
#define _mm512_cvtsepi32_epi8(v) (canter::emulated::saturate<__m128i, std::int8_t>((__m512i)(v)))
#undef _mm512_cvtsepi32_epi16
#undef _mm256_cvtsepi32_epi8
#define _mm512_cvtsepi32_epi16(v) (canter::emulated::saturate<__m256i, std::int16_t>((__m512i)(v)))
#define _mm256_cvtsepi32_epi8(v) (canter::emulated::saturate<__m128i, std::int8_t>((__m256i)(v)))

namespace canter::emulated {
inline __m512i round_ps(__m512 v) { return join(_mm256_cvtps_epi32(low(v)), _mm256_cvtps_epi32(high(v))); }
inline __m512i trunc_ps(__m512 v) { return join(_mm256_cvttps_epi32(low(v)), _mm256_cvttps_epi32(high(v))); }
inline __m512 from_ints(__m512i v) { return join(_mm256_cvtepi32_ps(low(v)), _mm256_cvtepi32_ps(high(v))); }
inline __m512 from_halves(__m256i v) {
    return join(_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
}
inline __m256i to_halves(__m512 v) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtps_ph(low(v), 0)), _mm256_cvtps_ph(high(v), 0), 1);
}
template <class ToReg, class FromReg>
inline ToReg to_bf16(FromReg v) { return convert<ToReg, std::uint16_t, float>(v, narrow); }
inline __m512bh pair_bf16(__m512 a, __m512 b) {  // the lower half from b
    return cast<__m512bh>(join(to_bf16<__m256i>(b), to_bf16<__m256i>(a)));
}
}  // namespace canter::emulated
#define _mm512_cvtps_epi32(v) (canter::emulated::round_ps(v))
#define _mm512_cvttps_epi32(v) (canter::emulated::trunc_ps(v))
#define _mm512_cvtepi32_ps(v) (canter::emulated::from_ints(v))
#define _mm512_cvtph_ps(v) (canter::emulated::from_halves(v))
#define _mm512_cvtps_ph(v, rounding) (canter::emulated::to_halves(v))
#define _mm512_cvtneps_pbh(v) (canter::emulated::to_bf16<__m256bh>((__m512)(v)))
#define _mm256_cvtneps_pbh(v) (canter::emulated::to_bf16<__m128bh>((__m256)(v)))
#define _mm512_cvtne2ps_pbh(a, b) (canter::emulated::pair_bf16(a, b))
#define _mm512_cvtpbh_ps(v) (_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(canter::emulated::cast<__m256i>(v)), 16)))

// Dot products: SIMDe's own leave the order of additions to the compiler.
#undef _mm512_dpbf16_ps
#undef _mm256_dpbf16_ps
#undef _mm512_dpbusd_epi32
#undef _mm256_dpbusd_epi32
#undef _mm_dpbusd_epi32
#undef _mm512_dpbusds_epi32
#define _mm512_dpbf16_ps(sum, a, b) (canter::emulated::dot_bf16((__m512)(sum), (__m512bh)(a), (__m512bh)(b)))
#define _mm256_dpbf16_ps(sum, a, b) (canter::emulated::dot_bf16((__m256)(sum), (__m256bh)(a), (__m256bh)(b)))
#define _mm512_dpbusd_epi32(sum, a, b) (canter::emulated::dot_bytes<false>((__m512i)(sum), (__m512i)(a), (__m512i)(b)))
#define _mm256_dpbusd_epi32(sum, a, b) (canter::emulated::dot_bytes<false>((__m256i)(sum), (__m256i)(a), (__m256i)(b)))
#define _mm_dpbusd_epi32(sum, a, b) (canter::emulated::dot_bytes<false>((__m128i)(sum), (__m128i)(a), (__m128i)(b)))
#define _mm512_dpbusds_epi32(sum, a, b) (canter::emulated::dot_bytes<true>((__m512i)(sum), (__m512i)(a), (__m512i)(b)))

// Reductions, halves first as compilers expand them.
#define _mm512_reduce_add_ps(v) (canter::emulated::reduce<float>((__m512)(v), [](float a, float b) { return a + b; }))
#define _mm512_reduce_max_ps(v) (canter::emulated::reduce<float>((__m512)(v), [](float a, float b) { return a > b ? a : b; }))
#define _mm512_reduce_min_ps(v) (canter::emulated::reduce<float>((__m512)(v), [](float a, float b) { return a < b ? a : b; }))
#define _mm512_reduce_add_epi32(v) \
    (static_cast<int>(canter::emulated::reduce<std::uint32_t>((__m512i)(v), [](auto a, auto b) { return a + b; })))
#define _mm512_reduce_max_epi32(v) (canter::emulated::reduce<std::int32_t>((__m512i)(v), [](auto a, auto b) { return a > b ? a : b; }))

// Lanes moved about.
#define _mm512_extractf32x8_ps(v, half) ((half) & 1 ? canter::emulated::high((__m512)(v)) : canter::emulated::low((__m512)(v)))
#define _mm512_extracti32x8_epi32(v, half) ((half) & 1 ? canter::emulated::high((__m512i)(v)) : canter::emulated::low((__m512i)(v)))
#define _mm512_broadcast_i32x8(v) (canter::emulated::join((__m256i)(v), (__m256i)(v)))
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4(a, b, order) (canter::emulated::shuffle_quarters(a, b, order))
#define _mm512_shuffle_i64x2(a, b, order) (canter::emulated::shuffle_quarters(a, b, order))
#define _mm512_shuffle_f32x4(a, b, order) \
    (_mm512_castsi512_ps(canter::emulated::shuffle_quarters(_mm512_castps_si512(a), _mm512_castps_si512(b), order)))
#define _mm512_shuffle_epi32(v, order) \
    (canter::emulated::each_quarter((__m512i)(v), [](__m128i q) { return _mm_shuffle_epi32(q, (order)); }))
#define _mm512_permute_ps(v, order) (_mm512_castsi512_ps(_mm512_shuffle_epi32(_mm512_castps_si512(v), order)))
#define _mm512_bsrli_epi128(v, bytes) (canter::emulated::each_quarter((__m512i)(v), [](__m128i q) { return _mm_bsrli_si128(q, (bytes)); }))
#define _mm512_zextsi256_si512(v) (canter::emulated::join((__m256i)(v), _mm256_setzero_si256()))
#define _mm512_i32gather_ps(index, base, scale) (canter::emulated::gather<__m512>((__m512i)(index), base, scale))
#define _mm512_i32gather_epi32(index, base, scale) (canter::emulated::gather<__m512i>((__m512i)(index), base, scale))

// The rest.
#define _mm512_srai_epi32(v, count)                                                        \
    (canter::emulated::join(_mm256_srai_epi32(canter::emulated::low((__m512i)(v)), count), \
                            _mm256_srai_epi32(canter::emulated::high((__m512i)(v)), count)))
// SIMDe 0.7.4 gives _mm512_madd_epi16 the arguments of its masked form.
namespace canter::emulated {
inline __m512i madd(__m512i a, __m512i b) { return join(_mm256_madd_epi16(low(a), low(b)), _mm256_madd_epi16(high(a), high(b))); }
inline __m512i multiply(__m512i a, __m512i b) { return join(_mm256_mullo_epi32(low(a), low(b)), _mm256_mullo_epi32(high(a), high(b))); }
inline __m512i maddubs(__m512i a, __m512i b) { return join(_mm256_maddubs_epi16(low(a), low(b)), _mm256_maddubs_epi16(high(a), high(b))); }
}  // namespace canter::emulated
// SIMDe multiplies as signed integers, whose overflow is not defined.
#undef _mm512_mullo_epi32
#define _mm512_mullo_epi32(a, b) (canter::emulated::multiply((__m512i)(a), (__m512i)(b)))
#undef _mm512_madd_epi16
#undef _mm512_maddubs_epi16
#define _mm512_madd_epi16(a, b) (canter::emulated::madd(a, b))
#define _mm512_maddubs_epi16(a, b) (canter::emulated::maddubs(a, b))
#undef _mm512_cmpeq_epi8_mask
#undef _mm512_cmpeq_epi16_mask
#define _mm512_cmpeq_epi8_mask(a, b) \
    (canter::emulated::compare<__mmask64, std::uint8_t>((__m512i)(a), (__m512i)(b), [](auto x, auto y) { return x == y; }))
#define _mm512_cmpeq_epi16_mask(a, b) \
    (canter::emulated::compare<__mmask32, std::uint16_t>((__m512i)(a), (__m512i)(b), [](auto x, auto y) { return x == y; }))
#define _mm512_stream_load_si512(p) (_mm512_load_si512(p))
#define _mm512_undefined_ps() (_mm512_setzero_ps())
