// Elementary functions on vectors. Included once per instruction set, with CANTER_ISA its namespace.

namespace canter::CANTER_ISA {

using Reg = Vec::reg;

// Load or store `count` lanes: all of them, or the first few.
template <class T>
inline Reg load_some(const T* p, std::int64_t count) {
    return count >= Vec::width ? Vec::load(p) : Vec::load_tail(p, static_cast<int>(count));
}

template <class T>
inline void store_some(T* p, Reg v, std::int64_t count) {
    if (count >= Vec::width) Vec::store(p, v);
    else Vec::store_tail(p, v, static_cast<int>(count));
}

template <class S, class D>
inline void copy_converted(const S* source, D* out, std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += Vec::width) store_some(out + i, load_some(source + i, count - i), count - i);
}

// Round to T and back: what a store and a load would leave.
template <class T>
inline Reg round_to(Reg v) {
    if constexpr (sizeof(T) == sizeof(float)) return v;
    T lanes[Vec::width];
    Vec::store(lanes, v);
    return Vec::load(lanes);
}

// e^x within 2 units in the last place; below -87.33 zero, above 88.72 infinity, NaN stays.
inline Reg exp(Reg x) {
    const Reg low = Vec::set1(-87.33654f), high = Vec::set1(88.72283f);
    const Reg clamped = Vec::max(low, Vec::min(high, x));
    const Reg n = Vec::round(Vec::mul(clamped, Vec::set1(1.44269504f)));
    // ln 2 in two parts: the first has few enough bits that n times it is exact.
    Reg r = Vec::fma(n, Vec::set1(-0.693359375f), clamped);
    r = Vec::fma(n, Vec::set1(2.12194440e-4f), r);
    // Taylor series to the seventh power: |r| < 0.35 leaves a remainder below 1e-8.
    Reg p = Vec::set1(1.0f / 5040);
    p = Vec::fma(p, r, Vec::set1(1.0f / 720));
    p = Vec::fma(p, r, Vec::set1(1.0f / 120));
    p = Vec::fma(p, r, Vec::set1(1.0f / 24));
    p = Vec::fma(p, r, Vec::set1(1.0f / 6));
    p = Vec::fma(p, r, Vec::set1(0.5f));
    p = Vec::fma(p, r, Vec::set1(1.0f));
    p = Vec::fma(p, r, Vec::set1(1.0f));
    // 2^n in two steps, for n = 128 has no float of its own.
    const Reg scaled = Vec::mul(Vec::mul(p, Vec::exp2_whole(Vec::sub(n, Vec::set1(1.0f)))), Vec::set1(2.0f));
    const Reg floored = Vec::select_greater(low, x, Vec::zero(), scaled);
    return Vec::select_greater(x, high, Vec::set1(__builtin_inff()), floored);
}

// e^x for x <= 0; NaN stays. As exp, without what only greater x need.
inline Reg exp_falling(Reg x) {
    const Reg low = Vec::set1(-87.33654f);
    const Reg clamped = Vec::max(low, x);
    const Reg n = Vec::round(Vec::mul(clamped, Vec::set1(1.44269504f)));
    Reg r = Vec::fma(n, Vec::set1(-0.693359375f), clamped);
    r = Vec::fma(n, Vec::set1(2.12194440e-4f), r);
    Reg p = Vec::set1(1.0f / 5040);
    p = Vec::fma(p, r, Vec::set1(1.0f / 720));
    p = Vec::fma(p, r, Vec::set1(1.0f / 120));
    p = Vec::fma(p, r, Vec::set1(1.0f / 24));
    p = Vec::fma(p, r, Vec::set1(1.0f / 6));
    p = Vec::fma(p, r, Vec::set1(0.5f));
    p = Vec::fma(p, r, Vec::set1(1.0f));
    p = Vec::fma(p, r, Vec::set1(1.0f));
    return Vec::select_greater(low, x, Vec::zero(), Vec::mul(p, Vec::exp2_whole(n)));
}

inline constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 0, as many operations as it takes for a relative error of 1e-7; below -126.5 zero, NaN stays.
inline Reg exp2_falling(Reg x) {
    const Reg clamped = Vec::max(Vec::set1(-127.0f), x);
    const Reg n = Vec::round(clamped), r = Vec::sub(clamped, n);
    // Fitted to (2^r - 1) / r for |r| <= 1/2, with a remainder below 1e-8; 2^0 is 1.
    Reg p = Vec::set1(1.5461447e-4f);
    p = Vec::fma(p, r, Vec::set1(1.3390867e-3f));
    p = Vec::fma(p, r, Vec::set1(9.6180567e-3f));
    p = Vec::fma(p, r, Vec::set1(5.5503571e-2f));
    p = Vec::fma(p, r, Vec::set1(2.4022651e-1f));
    p = Vec::fma(p, r, Vec::set1(6.9314719e-1f));
    p = Vec::fma(p, r, Vec::set1(1.0f));
    // The bits of a factor of 2^-127 would be those of zero.
    return Vec::mul(p, Vec::exp2_whole(n));
}

// x * sigmoid(y): the common form of SiLU (y = x) and of the tanh form of GELU.
inline Reg gate(Reg x, Reg y) {
    const Reg e = exp(Vec::sub(Vec::zero(), y));
    return Vec::div(x, Vec::add(Vec::set1(1.0f), e));
}

// ln(1 + e^x).
inline Reg softplus(Reg x) {
    // max(x, 0) + ln(1 + z) with z = e^-|x|, and ln(1 + z) = 2 artanh(z / (2 + z)): its argument is at most 1/3, where the
    // series to the fifteenth power leaves a remainder below 2e-9 of the value.
    const Reg z = exp(Vec::sub(Vec::zero(), Vec::abs(x)));
    const Reg s = Vec::div(z, Vec::add(Vec::set1(2.0f), z)), s2 = Vec::mul(s, s);
    Reg p = Vec::set1(2.0f / 15);
    p = Vec::fma(p, s2, Vec::set1(2.0f / 13));
    p = Vec::fma(p, s2, Vec::set1(2.0f / 11));
    p = Vec::fma(p, s2, Vec::set1(2.0f / 9));
    p = Vec::fma(p, s2, Vec::set1(2.0f / 7));
    p = Vec::fma(p, s2, Vec::set1(2.0f / 5));
    p = Vec::fma(p, s2, Vec::set1(2.0f / 3));
    p = Vec::fma(p, s2, Vec::set1(2.0f));
    return Vec::fma(p, s, Vec::max(x, Vec::zero()));
}

inline Reg tanh(Reg x) {
    const Reg one = Vec::set1(1.0f), two = Vec::set1(2.0f);
    const Reg large = Vec::sub(one, Vec::div(two, Vec::add(exp(Vec::mul(two, x)), one)));
    // Near zero the difference above cancels: there the series, whose remainder is below 1e-8 of the value.
    const Reg s = Vec::mul(x, x);
    Reg p = Vec::set1(62.0f / 2835);
    p = Vec::fma(p, s, Vec::set1(-17.0f / 315));
    p = Vec::fma(p, s, Vec::set1(2.0f / 15));
    p = Vec::fma(p, s, Vec::set1(-1.0f / 3));
    const Reg small = Vec::fma(Vec::mul(p, s), x, x);
    return Vec::select_greater(Vec::set1(0.25f), Vec::abs(x), small, large);
}

inline Reg cap_scores(Reg x, float cap) {
    const Reg c = Vec::set1(cap);
    return Vec::mul(tanh(Vec::div(x, c)), c);
}

}  // namespace canter::CANTER_ISA
