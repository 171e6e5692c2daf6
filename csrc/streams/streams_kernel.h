// Included once per instruction set.

namespace canter::CANTER_ISA {

// Coefficients of one row as floats.
template <class T>
inline void read_coefs(const StreamArgs& a, std::int64_t row, std::int64_t count, float* out) {
    if (!a.coefs) {
        for (std::int64_t i = 0; i < count; ++i) out[i] = 1.0f;
        return;
    }
    copy_converted(static_cast<const T*>(a.coefs) + row * count, out, count);
    for (std::int64_t i = 0; i < count; ++i) out[i] = out[i] * a.scale + a.offset;
}

template <class T>
inline void mix_streams_rows(const StreamArgs& a, std::int64_t begin, std::int64_t end) {
    float coefs[kMaxStreams * kMaxStreams];
    for (std::int64_t r = begin; r < end; ++r) {
        read_coefs<T>(a, r, a.streams * a.streams, coefs);
        const T* x = static_cast<const T*>(a.x) + r * a.streams * a.width;
        T* out = static_cast<T*>(a.out) + r * a.streams * a.width;
        for (std::int64_t i = 0; i < a.width; i += Vec::width) {
            const std::int64_t rest = a.width - i;
            for (std::int64_t o = 0; o < a.streams; ++o) {
                Reg sum = Vec::zero();
                for (std::int64_t s = 0; s < a.streams; ++s) {
                    sum = Vec::fma(Vec::set1(coefs[o * a.streams + s]), load_some(x + s * a.width + i, rest), sum);
                }
                store_some(out + o * a.width + i, Vec::add(sum, load_some(x + o * a.width + i, rest)), rest);
            }
        }
    }
}

template <class T>
inline void add_to_streams_rows(const StreamArgs& a, std::int64_t begin, std::int64_t end) {
    float coefs[kMaxStreams];
    for (std::int64_t r = begin; r < end; ++r) {
        read_coefs<T>(a, r, a.streams, coefs);
        const T* row = static_cast<const T*>(a.row) + r * a.row_stride;
        for (std::int64_t s = 0; s < a.streams; ++s) {
            const std::int64_t at = (r * a.streams + s) * a.width;
            const T* x = static_cast<const T*>(a.x) + at;
            T* out = static_cast<T*>(a.out) + at;
            const Reg c = Vec::set1(s < a.first ? 0.0f : coefs[s]);
            for (std::int64_t i = 0; i < a.width; i += Vec::width) {
                const std::int64_t rest = a.width - i;
                const Reg old = load_some(x + i, rest);
                store_some(out + i, s < a.first ? old : Vec::fma(c, load_some(row + i, rest), old), rest);
            }
        }
    }
}

template <class T>
inline void match_streams_rows(const StreamArgs& a, std::int64_t begin, std::int64_t end) {
    const float width = static_cast<float>(a.width);
    for (std::int64_t r = begin; r < end; ++r) {
        const T* row = static_cast<const T*>(a.row) + r * a.row_stride;
        const T* x = static_cast<const T*>(a.x) + r * (a.streams - 1) * a.width;
        T* out = static_cast<T*>(a.out) + r * a.streams * a.width;
        const float target = __builtin_sqrtf(sum_of_squares(row, a.width) / width);
        copy_converted(row, out, a.width);
        for (std::int64_t s = 1; s < a.streams; ++s, x += a.width) {
            const float mean = sum_of_squares(x, a.width) / width;
            const Reg factor = Vec::set1(target / __builtin_sqrtf(mean > 1e-5f ? mean : 1e-5f));
            for (std::int64_t i = 0; i < a.width; i += Vec::width) {
                const std::int64_t rest = a.width - i;
                store_some(out + s * a.width + i, Vec::mul(load_some(x + i, rest), factor), rest);
            }
        }
    }
}

inline void mix_streams(const StreamArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? mix_streams_rows<float>(a, begin, end) : mix_streams_rows<bf16>(a, begin, end);
}

inline void add_to_streams(const StreamArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? add_to_streams_rows<float>(a, begin, end) : add_to_streams_rows<bf16>(a, begin, end);
}

inline void match_streams(const StreamArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? match_streams_rows<float>(a, begin, end) : match_streams_rows<bf16>(a, begin, end);
}

}  // namespace canter::CANTER_ISA
