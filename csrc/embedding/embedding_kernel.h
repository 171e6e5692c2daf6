// Included once per instruction set.

namespace canter::CANTER_ISA {

template <class T>
inline void embedding_rows(const EmbeddingArgs& a, std::int64_t begin, std::int64_t end) {
    const Reg scale = Vec::set1(a.scale);
    for (std::int64_t r = begin; r < end; ++r) {
        const T* row = static_cast<const T*>(a.weight) + a.ids[r] * a.width;
        T* out = static_cast<T*>(a.out) + r * a.width;
        if (a.scale == 1.0f) {
            __builtin_memcpy(out, row, static_cast<std::size_t>(a.width) * sizeof(T));
            continue;
        }
        for (std::int64_t i = 0; i < a.width; i += Vec::width) {
            store_some(out + i, Vec::mul(load_some(row + i, a.width - i), scale), a.width - i);
        }
    }
}

inline void embedding(const EmbeddingArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? embedding_rows<float>(a, begin, end) : embedding_rows<bf16>(a, begin, end);
}

}  // namespace canter::CANTER_ISA
