// Included once per instruction set.

namespace canter::CANTER_ISA {

// Inputs lie in one run: an output is a sum of products along it.
template <class T>
inline void head_along_inputs(const T* x, const T* weight, T* out, const HeadLinearArgs& a) {
    for (std::int64_t n = 0; n < a.outputs; ++n) {
        const T* w = weight + n * a.n_stride;
        Reg sums[2] = {Vec::zero(), Vec::zero()};
        for (std::int64_t k = 0, j = 0; k < a.width; k += Vec::width, j ^= 1) {
            sums[j] = Vec::fma(load_some(x + k, a.width - k), load_some(w + k, a.width - k), sums[j]);
        }
        float total = Vec::sum(Vec::add(sums[0], sums[1]));
        copy_converted(&total, out + n, 1);
    }
}

// Outputs lie in one run: one input at a time is added to some of them.
template <class T>
inline void head_along_outputs(const T* x, const T* weight, T* out, const HeadLinearArgs& a) {
    for (std::int64_t n = 0; n < a.outputs; n += Vec::width) {
        const std::int64_t rest = a.outputs - n;
        Reg sum = Vec::zero();
        for (std::int64_t k = 0; k < a.width; ++k) {
            float factor;
            copy_converted(x + k, &factor, 1);
            sum = Vec::fma(Vec::set1(factor), load_some(weight + k * a.k_stride + n, rest), sum);
        }
        store_some(out + n, sum, rest);
    }
}

template <class T>
inline void head_linear_of(const HeadLinearArgs& a, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t head = i / a.rows, row = i % a.rows;  // the rows of a head follow each other: its matrix stays near
        const T* x = static_cast<const T*>(a.x) + row * a.x_row_stride + head * a.x_head_stride;
        const T* weight = static_cast<const T*>(a.weight) + head * a.outputs * a.width;
        T* out = static_cast<T*>(a.out) + (row * a.heads + head) * a.outputs;
        a.k_stride == 1 ? head_along_inputs<T>(x, weight, out, a) : head_along_outputs<T>(x, weight, out, a);
    }
}

inline void head_linear(const HeadLinearArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? head_linear_of<float>(a, begin, end) : head_linear_of<bf16>(a, begin, end);
}

}  // namespace canter::CANTER_ISA
