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

struct Moments {
    float mean, variance;
};

// The mean first, then the squares of what differs from it: sums of squares of large values would cancel.
template <class T>
inline Moments moments(const T* x, std::int64_t width) {
    Reg sum = Vec::zero();
    for (std::int64_t i = 0; i < width; i += Vec::width) sum = Vec::add(sum, load_some(x + i, width - i));
    const float mean = Vec::sum(sum) / static_cast<float>(width);
    float differences[Vec::width];
    Reg squares = Vec::zero();
    const Reg middle = Vec::set1(mean);
    std::int64_t i = 0;
    for (; i + Vec::width <= width; i += Vec::width) {
        const Reg d = Vec::sub(Vec::load(x + i), middle);
        squares = Vec::fma(d, d, squares);
    }
    if (i < width) {  // lanes behind the row's end must not count
        Vec::store(differences, Vec::sub(load_some(x + i, width - i), middle));
        const Reg d = load_some(differences, width - i);
        squares = Vec::fma(d, d, squares);
    }
    return {mean, Vec::sum(squares) / static_cast<float>(width)};
}

template <class T, class W>
inline void layer_norm_rows(const LayerNormArgs& a, std::int64_t begin, std::int64_t end) {
    const W* weight = static_cast<const W*>(a.weight);
    const W* bias = static_cast<const W*>(a.bias);
    for (std::int64_t r = begin; r < end; ++r) {
        const T* x = static_cast<const T*>(a.x) + r * a.width;
        T* out = static_cast<T*>(a.out) + r * a.width;
        const Moments found = moments(x, a.width);
        const Reg mean = Vec::set1(found.mean), factor = Vec::set1(1.0f / __builtin_sqrtf(found.variance + a.eps));
        for (std::int64_t i = 0; i < a.width; i += Vec::width) {
            const std::int64_t rest = a.width - i;
            const Reg normed = Vec::mul(Vec::sub(load_some(x + i, rest), mean), factor);
            const Reg scaled = Vec::mul(normed, load_some(weight + i, rest));
            store_some(out + i, bias ? Vec::add(scaled, load_some(bias + i, rest)) : scaled, rest);
        }
    }
}

inline void layer_norm(const LayerNormArgs& a, std::int64_t begin, std::int64_t end) {
    const bool wide = a.weight_type == DType::float32;
    if (a.type == DType::float32) wide ? layer_norm_rows<float, float>(a, begin, end) : layer_norm_rows<float, bf16>(a, begin, end);
    else wide ? layer_norm_rows<bf16, float>(a, begin, end) : layer_norm_rows<bf16, bf16>(a, begin, end);
}

template <class T>
inline void sparse_relu_rows(const SparseReluArgs& a, std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
        const T* x = static_cast<const T*>(a.x) + r * a.x_stride;
        T* out = static_cast<T*>(a.out) + r * a.width;
        const Moments found = moments(x, a.width);
        const Reg cut = Vec::set1(found.mean + __builtin_sqrtf(found.variance) * a.deviations);
        for (std::int64_t i = 0; i < a.width; i += Vec::width) {
            const std::int64_t rest = a.width - i;
            store_some(out + i, Vec::max(Vec::sub(load_some(x + i, rest), cut), Vec::zero()), rest);
        }
    }
}

inline void sparse_relu(const SparseReluArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? sparse_relu_rows<float>(a, begin, end) : sparse_relu_rows<bf16>(a, begin, end);
}

}  // namespace canter::CANTER_ISA
