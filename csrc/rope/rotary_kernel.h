// Included once per instruction set.

namespace canter::CANTER_ISA {

template <class T>
inline void rotate_heads(T* head, std::int64_t heads, std::int64_t head_dim, const float* cosines, std::int64_t half) {
    const float* sines = cosines + half;
    for (std::int64_t h = 0; h < heads; ++h, head += head_dim) {
        for (std::int64_t i = 0; i < half; i += Vec::width) {
            const std::int64_t rest = half - i;
            const Reg c = load_some(cosines + i, rest), s = load_some(sines + i, rest);
            const Reg first = load_some(head + i, rest), second = load_some(head + half + i, rest);
            store_some(head + i, Vec::sub(Vec::mul(first, c), Vec::mul(second, s)), rest);
            store_some(head + half + i, Vec::add(Vec::mul(second, c), Vec::mul(first, s)), rest);
        }
    }
}

template <class T>
inline void rotate_neighbours(T* head, std::int64_t heads, std::int64_t head_dim, const float* cosines, std::int64_t half) {
    const float* sines = cosines + half;
    // Pairs are taken apart into two runs of a vector each, and put together again.
    float first[Vec::width], second[Vec::width], pairs[2 * Vec::width];
    for (std::int64_t h = 0; h < heads; ++h, head += head_dim) {
        for (std::int64_t i = 0; i < half; i += Vec::width) {
            const std::int64_t count = half - i < Vec::width ? half - i : Vec::width;
            T* at = head + 2 * i;
            copy_converted(at, pairs, 2 * count);
            for (std::int64_t j = 0; j < count; ++j) first[j] = pairs[2 * j], second[j] = pairs[2 * j + 1];
            const Reg c = load_some(cosines + i, count), s = load_some(sines + i, count);
            const Reg a = load_some(first, count), b = load_some(second, count);
            store_some(first, Vec::sub(Vec::mul(a, c), Vec::mul(b, s)), count);
            store_some(second, Vec::add(Vec::mul(b, c), Vec::mul(a, s)), count);
            for (std::int64_t j = 0; j < count; ++j) pairs[2 * j] = first[j], pairs[2 * j + 1] = second[j];
            copy_converted(pairs, at, 2 * count);
        }
    }
}

template <class T>
inline void rotary_rows(const RotaryArgs& a, std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
        const float* row = a.cos_sin + a.positions[t] * a.rot_dim;
        const auto rotate = a.interleaved ? rotate_neighbours<T> : rotate_heads<T>;
        rotate(static_cast<T*>(a.q) + t * a.q_stride, a.q_heads, a.head_dim, row, a.rot_dim / 2);
        rotate(static_cast<T*>(a.k) + t * a.k_stride, a.k_heads, a.head_dim, row, a.rot_dim / 2);
    }
}

inline void rotary(const RotaryArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? rotary_rows<float>(a, begin, end) : rotary_rows<bf16>(a, begin, end);
}

}  // namespace canter::CANTER_ISA
