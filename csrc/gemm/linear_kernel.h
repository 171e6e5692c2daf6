// Tiles of R rows by C columns, their sums in registers. Included once per instruction set.

namespace canter::CANTER_ISA {

// Sums over [begin, end) of the products of R rows of x and C rows of w, set into or added to out. A nonzero `ahead`
// asks the memory for what lies so many elements further on.
template <int R, int C, class W>
inline void dot_tile(const float* x, std::int64_t x_stride, const W* const* w, std::int64_t begin, std::int64_t end, float* out,
                     std::int64_t out_stride, bool add, std::int64_t ahead = 0) {
    constexpr int padded = (R * C + 3) / 4 * 4;
    Reg sums[padded];
#pragma GCC unroll 32
    for (int i = 0; i < padded; ++i) sums[i] = Vec::zero();
    std::int64_t k = begin;
    for (; k + Vec::width <= end; k += Vec::width) {
        Reg columns[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
            columns[c] = Vec::load(w[c] + k);
            if (ahead != 0) __builtin_prefetch(w[c] + k + ahead);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Reg row = Vec::load(x + r * x_stride + k);
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c) sums[r * C + c] = Vec::fma(row, columns[c], sums[r * C + c]);
        }
    }
    if (k < end) {
        const int rest = static_cast<int>(end - k);
        Reg columns[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) columns[c] = Vec::load_tail(w[c] + k, rest);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Reg row = Vec::load_tail(x + r * x_stride + k, rest);
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c) sums[r * C + c] = Vec::fma(row, columns[c], sums[r * C + c]);
        }
    }
    float totals[padded];
#pragma GCC unroll 8
    for (int i = 0; i < padded; i += 4) Vec::sum4(sums + i, totals + i);
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) {
            float& place = out[r * out_stride + c];
            place = add ? place + totals[r * C + c] : totals[r * C + c];
        }
    }
}

template <int N>
struct Columns {
    static constexpr int value = N;
};

// Columns [0, count) of R rows, C at a time and then one by one. `row_of` gives the address of a row of w.
template <int R, int C, class W, class RowOf>
inline void dot_rows(const float* x, std::int64_t x_stride, RowOf row_of, std::int64_t count, std::int64_t begin, std::int64_t end, float* out,
                     std::int64_t out_stride, bool add) {
    std::int64_t c = 0;
    for (; c + C <= count; c += C) {
        const W* w[C];
        for (int i = 0; i < C; ++i) w[i] = row_of(c + i);
        dot_tile<R, C, W>(x, x_stride, w, begin, end, out + c, out_stride, add);
    }
    for (; c < count; ++c) {
        const W* w[1] = {row_of(c)};
        dot_tile<R, 1, W>(x, x_stride, w, begin, end, out + c, out_stride, add);
    }
}

// All of rows x columns: tiles as large as the registers hold.
template <class W, class RowOf>
inline void dot_panel(const float* x, std::int64_t x_stride, std::int64_t rows, RowOf row_of, std::int64_t count, std::int64_t begin,
                      std::int64_t end, float* out, std::int64_t out_stride, bool add) {
    constexpr bool wide = Vec::registers >= 32;
    std::int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        dot_rows<4, wide ? 6 : 3, W>(x + r * x_stride, x_stride, row_of, count, begin, end, out + r * out_stride, out_stride, add);
    }
    const float* rest = x + r * x_stride;
    float* place = out + r * out_stride;
    if (rows - r == 3) dot_rows<3, wide ? 8 : 4, W>(rest, x_stride, row_of, count, begin, end, place, out_stride, add);
    if (rows - r == 2) dot_rows<2, wide ? 8 : 4, W>(rest, x_stride, row_of, count, begin, end, place, out_stride, add);
    if (rows - r == 1) dot_rows<1, 8, W>(rest, x_stride, row_of, count, begin, end, place, out_stride, add);
}

// Few rows: every weight is used once, so they are read in the order of memory, a few rows of w from end to end.
template <int R, int C, class W>
inline void linear_stream(const LinearArgs& a, const float* x, const W* weight, std::int64_t count, float* sums) {
    std::int64_t c = 0;
    const auto run = [&](auto columns) {
        constexpr int n = decltype(columns)::value;
        const W* w[n];
        for (int i = 0; i < n; ++i) w[i] = weight + (c + i) * a.width;
        for (std::int64_t begin = 0; begin < a.width; begin += a.block) {
            const std::int64_t end = begin + a.block < a.width ? begin + a.block : a.width;
            dot_tile<R, n, W>(x, a.width, w, begin, end, sums + c, count, begin > 0, n * a.width);
        }
        c += n;
    };
    while (c + C <= count) run(Columns<C>{});
    while (c < count) run(Columns<1>{});
}

template <class W>
inline void linear_sums(const LinearArgs& a, const LinearTile& t, float* sums, std::int64_t stride) {
    const W* weight = static_cast<const W*>(a.weight) + t.col_begin * a.width;
    const float* x = a.x + t.row_begin * a.width;
    const std::int64_t rows = t.row_end - t.row_begin;
    if (rows == 1) return linear_stream<1, 4, W>(a, x, weight, stride, sums);
    if (rows == 2) return linear_stream<2, 4, W>(a, x, weight, stride, sums);
    if (rows == 3) return linear_stream<3, 4, W>(a, x, weight, stride, sums);
    if (rows == 4) return linear_stream<4, 3, W>(a, x, weight, stride, sums);
    // Many rows: a panel of w stays in the cache while all rows pass by.
    const auto row_of = [&](std::int64_t c) { return weight + c * a.width; };
    for (std::int64_t begin = 0; begin < a.width; begin += a.block) {
        const std::int64_t end = begin + a.block < a.width ? begin + a.block : a.width;
        dot_panel<W>(x, a.width, rows, row_of, stride, begin, end, sums, stride, begin > 0);
    }
}

template <class T>
inline void linear_store(const LinearArgs& a, const LinearTile& t, const float* sums, std::int64_t stride) {
    for (std::int64_t r = t.row_begin; r < t.row_end; ++r, sums += stride) {
        T* out = static_cast<T*>(a.out) + r * a.outputs + t.col_begin;
        for (std::int64_t c = 0; c < stride; c += Vec::width) {
            Reg v = load_some(sums + c, stride - c);
            if (a.bias) v = Vec::add(v, load_some(a.bias + t.col_begin + c, stride - c));
            store_some(out + c, v, stride - c);
        }
    }
}

// `scratch` holds as many floats as the tile has outputs.
inline void linear(const LinearArgs& a, const LinearTile& t, float* scratch) {
    const std::int64_t stride = t.col_end - t.col_begin;
    if (a.weight_type == DType::float32) linear_sums<float>(a, t, scratch, stride);
    else linear_sums<bf16>(a, t, scratch, stride);
    if (a.out_type == DType::float32) linear_store<float>(a, t, scratch, stride);
    else linear_store<bf16>(a, t, scratch, stride);
}

inline void widen(const bf16* source, float* out, std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += Vec::width) store_some(out + i, load_some(source + i, count - i), count - i);
}

}  // namespace canter::CANTER_ISA
