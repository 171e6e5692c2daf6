// Included once per instruction set.

namespace canter::CANTER_ISA {

// x Phi(x). The tail of the normal distribution, erfc(z) / 2 with z = |x| / sqrt(2), by Abramowitz and Stegun 7.1.26: it is off by
// less than 1e-7, and needs no difference for x below zero.
inline Reg gelu_by_erf(Reg x) {
    const Reg one = Vec::set1(1.0f), z = Vec::mul(Vec::abs(x), Vec::set1(0.70710678f));
    const Reg t = Vec::div(one, Vec::fma(Vec::set1(0.3275911f), z, one));
    Reg p = Vec::set1(1.061405429f);
    p = Vec::fma(p, t, Vec::set1(-1.453152027f));
    p = Vec::fma(p, t, Vec::set1(1.421413741f));
    p = Vec::fma(p, t, Vec::set1(-0.284496736f));
    p = Vec::fma(p, t, Vec::set1(0.254829592f));
    const Reg tail = Vec::mul(Vec::mul(Vec::mul(p, t), Vec::set1(0.5f)), exp(Vec::sub(Vec::zero(), Vec::mul(z, z))));
    return Vec::mul(x, Vec::select_greater(x, Vec::zero(), Vec::sub(one, tail), tail));
}

inline Reg activate(Activation activation, Reg x) {
    if (activation == Activation::silu) return gate(x, x);
    if (activation == Activation::gelu) return gelu_by_erf(x);
    // (1 + tanh(y)) / 2 = sigmoid(2y), with y = sqrt(2 / pi) * (x + 0.044715 x^3).
    const Reg inner = Vec::fma(Vec::mul(Vec::set1(0.044715f), Vec::mul(x, x)), x, x);
    return gate(x, Vec::mul(Vec::set1(1.5957691216f), inner));
}

template <class T>
inline void gated_rows(const GatedArgs& a, std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
        const T* gate_row = static_cast<const T*>(a.gate_up) + r * 2 * a.width;
        const T* up_row = gate_row + a.width;
        T* out = static_cast<T*>(a.out) + r * a.width;
        for (std::int64_t i = 0; i < a.width; i += Vec::width) {
            const std::int64_t rest = a.width - i;
            const Reg v = activate(a.activation, load_some(gate_row + i, rest));
            store_some(out + i, Vec::mul(v, load_some(up_row + i, rest)), rest);
        }
    }
}

inline void gated(const GatedArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? gated_rows<float>(a, begin, end) : gated_rows<bf16>(a, begin, end);
}

template <class T, class F>
inline void pointwise_rows(const PointwiseArgs& a, std::int64_t begin, std::int64_t end, F&& f) {
    for (std::int64_t r = begin; r < end; ++r) {
        const T* x = static_cast<const T*>(a.x) + r * a.x_stride;
        const T* y = static_cast<const T*>(a.y) + r * a.y_stride;
        T* out = static_cast<T*>(a.out) + r * a.width;
        for (std::int64_t i = 0; i < a.width; i += Vec::width) {
            const std::int64_t rest = a.width - i;
            store_some(out + i, f(load_some(x + i, rest), y + i, i, rest), rest);
        }
    }
}

template <class T>
inline void pointwise_of(const PointwiseArgs& a, std::int64_t begin, std::int64_t end) {
    switch (a.kind) {
        case Pointwise::silu:
            return pointwise_rows<T>(a, begin, end, [](Reg x, const T*, std::int64_t, std::int64_t) { return gate(x, x); });
        case Pointwise::relu_squared:
            return pointwise_rows<T>(a, begin, end, [](Reg x, const T*, std::int64_t, std::int64_t) {
                const Reg positive = Vec::max(x, Vec::zero());
                return Vec::mul(positive, positive);
            });
        case Pointwise::scale_columns:
            return pointwise_rows<T>(a, begin, end, [&](Reg x, const T*, std::int64_t i, std::int64_t rest) {
                return Vec::mul(x, load_some(a.factors + i, rest));
            });
        case Pointwise::sigmoid_mul:
            return pointwise_rows<T>(a, begin, end, [](Reg x, const T* y, std::int64_t, std::int64_t rest) {
                return gate(x, load_some(y, rest));
            });
        case Pointwise::silu_mul:
            return pointwise_rows<T>(a, begin, end, [](Reg x, const T* y, std::int64_t, std::int64_t rest) {
                const Reg other = load_some(y, rest);
                return Vec::mul(x, gate(other, other));
            });
        case Pointwise::weighted_sum:
            return pointwise_rows<T>(a, begin, end, [&](Reg x, const T* y, std::int64_t, std::int64_t rest) {
                return Vec::fma(Vec::set1(a.a), x, Vec::mul(Vec::set1(a.b), load_some(y, rest)));
            });
        case Pointwise::gelu_tanh:
            return pointwise_rows<T>(a, begin, end, [](Reg x, const T*, std::int64_t, std::int64_t) {
                return activate(Activation::gelu_tanh, x);
            });
        case Pointwise::gelu:
            return pointwise_rows<T>(a, begin, end, [](Reg x, const T*, std::int64_t, std::int64_t) { return gelu_by_erf(x); });
        case Pointwise::gelu_tanh_mul:
            return pointwise_rows<T>(a, begin, end, [](Reg x, const T* y, std::int64_t, std::int64_t rest) {
                return Vec::mul(x, activate(Activation::gelu_tanh, load_some(y, rest)));
            });
    }
}

inline void pointwise(const PointwiseArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? pointwise_of<float>(a, begin, end) : pointwise_of<bf16>(a, begin, end);
}

template <class T>
inline void softcap_range(const SoftcapArgs& a, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += Vec::width) {
        store_some(static_cast<T*>(a.out) + i, cap_scores(load_some(static_cast<const T*>(a.x) + i, end - i), a.cap), end - i);
    }
}

inline void softcap(const SoftcapArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? softcap_range<float>(a, begin, end) : softcap_range<bf16>(a, begin, end);
}

}  // namespace canter::CANTER_ISA
