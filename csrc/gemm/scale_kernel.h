// Included once per instruction set.

namespace canter::CANTER_ISA {

template <class T>
inline void scale_values(T* x, std::int64_t count, float factor) {
    const Reg factors = Vec::set1(factor);
    for (std::int64_t i = 0; i < count; i += Vec::width) store_some(x + i, Vec::mul(load_some(x + i, count - i), factors), count - i);
}

inline void scale(void* x, DType type, std::int64_t count, float factor) {
    if (type == DType::float32) scale_values(static_cast<float*>(x), count, factor);
    else scale_values(static_cast<bf16*>(x), count, factor);
}

}  // namespace canter::CANTER_ISA
