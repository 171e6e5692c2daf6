// Included once per instruction set.

namespace canter::CANTER_ISA {

// Four running sums, so that additions overlap; added pairwise at the end.
template <class T>
inline float sum_of_squares(const T* x, std::int64_t width) {
    Reg sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    std::int64_t i = 0;
    for (; i + 4 * Vec::width <= width; i += 4 * Vec::width) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const Reg v = Vec::load(x + i + j * Vec::width);
            sums[j] = Vec::fma(v, v, sums[j]);
        }
    }
    for (int j = 0; i < width; i += Vec::width, ++j) {
        const Reg v = load_some(x + i, width - i);
        sums[j] = Vec::fma(v, v, sums[j]);
    }
    return Vec::sum(Vec::add(Vec::add(sums[0], sums[1]), Vec::add(sums[2], sums[3])));
}

template <class T, class W>
inline void rms_norm_row(const NormArgs& a, const T* x, const W* weight, T* out) {
    const float mean = sum_of_squares(x, a.width) / static_cast<float>(a.width);
    const Reg factor = Vec::set1(1.0f / __builtin_sqrtf(mean + a.eps));
    for (std::int64_t i = 0; i < a.width; i += Vec::width) {
        const std::int64_t rest = a.width - i;
        Reg normed = Vec::mul(load_some(x + i, rest), factor);
        Reg w = load_some(weight + i, rest);
        if (a.plus_one) w = Vec::add(Vec::set1(1.0f), w);
        if (a.cast_first) {
            normed = round_to<T>(normed);
            w = round_to<W>(w);
        }
        store_some(out + i, Vec::mul(normed, w), rest);
    }
}

template <class T>
inline void add_rows(const T* x, const T* y, T* out, std::int64_t width) {
    for (std::int64_t i = 0; i < width; i += Vec::width) {
        store_some(out + i, Vec::add(load_some(x + i, width - i), load_some(y + i, width - i)), width - i);
    }
}

template <class T, class W>
inline void rms_norm_rows(const NormArgs& a, std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
        const std::int64_t at = r * a.width;
        const T* x = static_cast<const T*>(a.x) + r / a.group * a.x_stride + r % a.group * a.width;
        if (a.residual) {
            T* total = static_cast<T*>(a.total) + at;
            add_rows(x, static_cast<const T*>(a.residual) + at, total, a.width);
            x = total;
        }
        rms_norm_row(a, x, static_cast<const W*>(a.weight), static_cast<T*>(a.out) + at);
    }
}

inline void rms_norm(const NormArgs& a, std::int64_t begin, std::int64_t end) {
    const bool wide = a.weight_type == DType::float32;
    if (a.type == DType::float32) wide ? rms_norm_rows<float, float>(a, begin, end) : rms_norm_rows<float, bf16>(a, begin, end);
    else wide ? rms_norm_rows<bf16, float>(a, begin, end) : rms_norm_rows<bf16, bf16>(a, begin, end);
}

}  // namespace canter::CANTER_ISA
