// Kernels over float weights. Included once per instruction set, by files that declare `Lanes` in canter's unnamed
// namespace (each file keeps its own copies: none of this may be shared between instruction sets):
//   width, reg, zero(), set1(), load(), store(), fma(), add(), load_bf16(), store_bf16(): vectors of floats;
//   pairs, load_pairs(), even(), odd(): lanes of 32 bits that hold two bf16, and their halves as floats;
//   pin(): keeps a sum in its register where the compiler would hoist loads over it and spill;
//   max_rows: rows of the register tile; few_rows, stream_panels(rows): the shape for few rows; block_panels: for many.
//
// An output's sum is one chain of fused multiply-adds over ascending k in one lane (of pairs of k, where rows are bf16).
// Sums that rest in memory between chunks keep their bits. So a row's bits depend neither on tiles nor on other rows.

namespace canter {
namespace {

using Reg = Lanes::reg;

constexpr int kPanelRegs = kPanelOutputs / Lanes::width;
constexpr std::int64_t kLine = 64;  // bytes of a panel that are read together: a step along the width

// sums[r][i] += values[r] * weights[i], whichever of the two are fewer held in registers. Value(r), Weight(i), Fma(a, b, c).
template <int R, int W, class Value, class Weight, class Fma>
inline __attribute__((always_inline)) void add_products(Reg* sums, Value value_of, Weight weight_of, Fma fma) {
    if constexpr (R < W) {
        decltype(value_of(0)) values[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) values[r] = value_of(r);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
            const auto weight = weight_of(i);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                sums[r * W + i] = fma(values[r], weight, sums[r * W + i]);
                Lanes::pin(sums[r * W + i]);
            }
        }
    } else {
        decltype(weight_of(0)) weights[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) weights[i] = weight_of(i);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const auto value = value_of(r);
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) {
                sums[r * W + i] = fma(value, weights[i], sums[r * W + i]);
                Lanes::pin(sums[r * W + i]);
            }
        }
    }
}

inline __attribute__((always_inline)) Reg fma_floats(Reg a, Reg b, Reg c) { return Lanes::fma(a, b, c); }

// Where register i of a line lies: panels of kPanelRegs registers.
inline __attribute__((always_inline)) const std::uint8_t* place_of(const std::uint8_t* w, std::int64_t panel, int i) {
    return w + i / kPanelRegs * panel + i % kPanelRegs * Lanes::width * 4;
}

// f32 weights: one k a line.
struct FloatLines {
    using Row = float;
    static constexpr std::int64_t elements = 1;

    template <int R, int P>
    static inline __attribute__((always_inline)) void line(Reg* sums, const float* x, std::int64_t x_stride, const std::uint8_t* w,
                                                           std::int64_t panel) {
        add_products<R, P * kPanelRegs>(
            sums, [&](int r) __attribute__((always_inline)) { return Lanes::set1(x[r * x_stride]); },
            [&](int i) __attribute__((always_inline)) { return Lanes::load(reinterpret_cast<const float*>(place_of(w, panel, i))); },
            fma_floats);
    }

    template <int R, int P>
    static inline void last(Reg*, const float*, std::int64_t, const std::uint8_t*, std::int64_t) {}
};

// bf16 weights, rows of floats: two k a line, one after the other.
struct Bf16Lines {
    using Row = float;
    static constexpr std::int64_t elements = 2;

    template <int R, int P>
    static inline __attribute__((always_inline)) void line(Reg* sums, const float* x, std::int64_t x_stride, const std::uint8_t* w,
                                                           std::int64_t panel) {
        last<R, P>(sums, x, x_stride, w, panel);
        add_products<R, P * kPanelRegs>(
            sums, [&](int r) __attribute__((always_inline)) { return Lanes::set1(x[r * x_stride + 1]); },
            [&](int i) __attribute__((always_inline)) { return Lanes::odd(Lanes::load_pairs(place_of(w, panel, i))); }, fma_floats);
    }

    template <int R, int P>
    static inline __attribute__((always_inline)) void last(Reg* sums, const float* x, std::int64_t x_stride, const std::uint8_t* w,
                                                           std::int64_t panel) {
        add_products<R, P * kPanelRegs>(
            sums, [&](int r) __attribute__((always_inline)) { return Lanes::set1(x[r * x_stride]); },
            [&](int i) __attribute__((always_inline)) { return Lanes::even(Lanes::load_pairs(place_of(w, panel, i))); }, fma_floats);
    }
};

#if defined(CANTER_FLOAT_PAIRS)
// bf16 weights, bf16 rows: one instruction takes a pair of each.
struct PairLines {
    using Row = bf16;
    static constexpr std::int64_t elements = 2;

    template <int R, int P, bool Last>
    static inline __attribute__((always_inline)) void pairs(Reg* sums, const bf16* x, std::int64_t x_stride, const std::uint8_t* w,
                                                            std::int64_t panel) {
        const auto value_of = [&](int r) __attribute__((always_inline)) {
            std::uint32_t pair = x[r * x_stride].bits;
            if constexpr (!Last) __builtin_memcpy(&pair, x + r * x_stride, sizeof pair);
            return Lanes::set1_pair(pair);
        };
        add_products<R, P * kPanelRegs>(
            sums, value_of, [&](int i) __attribute__((always_inline)) { return Lanes::load_pairs(place_of(w, panel, i)); },
            [](Lanes::pairs a, Lanes::pairs b, Reg c) __attribute__((always_inline)) { return Lanes::dot_pairs(a, b, c); });
    }

    template <int R, int P>
    static inline __attribute__((always_inline)) void line(Reg* sums, const bf16* x, std::int64_t x_stride, const std::uint8_t* w,
                                                           std::int64_t panel) {
        pairs<R, P, false>(sums, x, x_stride, w, panel);
    }

    template <int R, int P>
    static inline void last(Reg* sums, const bf16* x, std::int64_t x_stride, const std::uint8_t* w, std::int64_t panel) {
        pairs<R, P, true>(sums, x, x_stride, w, panel);
    }
};
#endif

// What to ask the memory for meanwhile: at each line, `at` of each panel; then `at` moves on by `step`, and after `turn`
// lines by `jump` as well.
struct Ahead {
    const std::uint8_t* at;
    std::int64_t step, turn, jump;
};

// R rows by P panels over `count` elements, their sums in registers; `add`: sums begin with what is there.
template <class Lines, int R, int P, bool Near>
inline __attribute__((always_inline)) void micro(const typename Lines::Row* x, std::int64_t x_stride, const std::uint8_t* w,
                                                 std::int64_t panel, std::int64_t count, float* out, std::int64_t out_stride, bool add,
                                                 Ahead ahead) {
    Reg sums[R * P * kPanelRegs];
    if (add) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
            for (int i = 0; i < P * kPanelRegs; ++i) sums[r * P * kPanelRegs + i] = Lanes::load(out + r * out_stride + i * Lanes::width);
        }
    } else {
#pragma GCC unroll 64
        for (int i = 0; i < R * P * kPanelRegs; ++i) sums[i] = Lanes::zero();
    }
    for (std::int64_t lines = count / Lines::elements, i = 0; i < lines; ++i) {
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p) {
            if constexpr (Near) __builtin_prefetch(ahead.at + p * panel, 0, 3);
            else __builtin_prefetch(ahead.at + p * panel, 0, 2);
        }
        ahead.at += ahead.step;
        if constexpr (Near) ahead.at += i == ahead.turn ? ahead.jump : 0;
        Lines::template line<R, P>(sums, x, x_stride, w, panel);
        x += Lines::elements;
        w += kLine;
    }
    if (Lines::elements == 2 && count % 2 != 0) Lines::template last<R, P>(sums, x, x_stride, w, panel);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
        for (int i = 0; i < P * kPanelRegs; ++i) Lanes::store(out + r * out_stride + i * Lanes::width, sums[r * P * kPanelRegs + i]);
    }
}

inline std::int64_t lines_of(std::int64_t elements, std::int64_t per_line) { return (elements + per_line - 1) / per_line; }

// Few rows: every weight is used once, so panels are read from end to end, a few side by side.
constexpr std::int64_t kAheadLines = 16;

template <class Lines, int R, int P>
inline void stream_run(const FloatTile& t, std::int64_t panel_bytes, std::int64_t& p) {
    const auto* x = static_cast<const typename Lines::Row*>(t.rows.data) + t.row_begin * t.rows.row_stride;
    const std::int64_t lines = lines_of(t.w->width, Lines::elements), near = lines < kAheadLines ? lines : kAheadLines;
    for (; p + P <= t.panel_end; p += P) {
        const std::uint8_t* w = t.w->data + p * panel_bytes;
        // Close to the end of these panels, the beginnings of the next come first.
        const Ahead ahead{w + near * kLine, kLine, lines - near - 1, (P - 1) * panel_bytes};
        micro<Lines, R, P, true>(x, t.rows.row_stride, w, panel_bytes, t.w->width, t.sums + (p - t.panel_begin) * kPanelOutputs,
                                 t.sums_stride, false, ahead);
    }
}

template <class Lines, int R>
inline void stream_rows(const FloatTile& t) {
    constexpr int panels = Lanes::stream_panels(R);
    const std::int64_t panel_bytes = lines_of(t.w->width, Lines::elements) * kLine;
    std::int64_t p = t.panel_begin;
    stream_run<Lines, R, panels>(t, panel_bytes, p);
    if constexpr (panels > 3) stream_run<Lines, R, panels / 2>(t, panel_bytes, p);
    if constexpr (panels > 1) stream_run<Lines, R, 1>(t, panel_bytes, p);
}

// Many rows: a chunk of a few panels stays in the first cache while all rows pass by.
template <class Lines, int R, int P>
void block_rows(const typename Lines::Row* x, const std::uint8_t* w, std::int64_t panel, std::int64_t count, float* out,
                std::int64_t out_stride, bool add, Ahead ahead) {
    micro<Lines, R, P, false>(x, kChunk, w, panel, count, out, out_stride, add, ahead);
}

template <class Lines, int P, int R = Lanes::max_rows>
inline void block_rows_any(std::int64_t rows, const typename Lines::Row* x, const std::uint8_t* w, std::int64_t panel, std::int64_t count,
                           float* out, std::int64_t out_stride, bool add, Ahead ahead) {
    if constexpr (R > 1) {
        if (rows != R) return block_rows_any<Lines, P, R - 1>(rows, x, w, panel, count, out, out_stride, add, ahead);
    }
    block_rows<Lines, R, P>(x, w, panel, count, out, out_stride, add, ahead);
}

template <class Lines, int P>
inline void block_step(const FloatTile& t, std::int64_t panel_bytes, std::int64_t p, std::int64_t begin, const std::uint8_t* next) {
    const std::int64_t rows = t.row_end - t.row_begin, groups = (rows + Lanes::max_rows - 1) / Lanes::max_rows;
    const std::int64_t count = begin + kChunk < t.w->width ? kChunk : t.w->width - begin, lines = lines_of(count, Lines::elements);
    const std::uint8_t* w = t.w->data + p * panel_bytes + begin / Lines::elements * kLine;
    const auto* x = static_cast<const typename Lines::Row*>(t.rows.data) + begin / kChunk * t.rows.chunk_stride + t.row_begin * kChunk;
    float* sums = t.sums + (p - t.panel_begin) * kPanelOutputs;
    for (std::int64_t g = 0; g < groups; ++g) {
        const std::int64_t row = rows * g / groups, end = rows * (g + 1) / groups;
        const Ahead ahead{next + lines * kLine * g / groups, kLine / groups, 0, 0};
        block_rows_any<Lines, P>(end - row, x + row * kChunk, w, panel_bytes, count, sums + row * t.sums_stride, t.sums_stride, begin > 0,
                                 ahead);
    }
}

// Rows whose every chunk fits into the second cache: panels are read from end to end.
constexpr std::int64_t kNearBytes = 256 << 10;

template <class Lines>
inline void block(const FloatTile& t) {
    constexpr int P = Lanes::block_panels;
    const std::int64_t width = t.w->width, panel_bytes = lines_of(width, Lines::elements) * kLine;
    const auto place = [&](std::int64_t p, std::int64_t k) { return t.w->data + p * panel_bytes + k / Lines::elements * kLine; };
    const auto run = [&](std::int64_t p, std::int64_t k, const std::uint8_t* next) {
        if (p + P <= t.panel_end) return block_step<Lines, P>(t, panel_bytes, p, k, next);
        for (; p < t.panel_end; ++p) block_step<Lines, 1>(t, panel_bytes, p, k, next);
    };
    if ((t.row_end - t.row_begin) * width * static_cast<std::int64_t>(sizeof(typename Lines::Row)) <= kNearBytes) {
        for (std::int64_t p = t.panel_begin; p < t.panel_end; p += P) {
            for (std::int64_t k = 0; k < width; k += kChunk) run(p, k, k + kChunk < width ? place(p, k + kChunk) : place(p + P, 0));
        }
    } else {
        for (std::int64_t k = 0; k < width; k += kChunk) {
            for (std::int64_t p = t.panel_begin; p < t.panel_end; p += P) {
                run(p, k, p + P < t.panel_end ? place(p + P, k) : place(t.panel_begin, k + kChunk));
            }
        }
    }
}

template <class Lines, int R = Lanes::few_rows>
inline void stream(const FloatTile& t) {
    if constexpr (R > 1) {
        if (t.row_end - t.row_begin != R) return stream<Lines, R - 1>(t);
    }
    stream_rows<Lines, R>(t);
}

template <class Lines>
inline void tile_of(const FloatTile& t) {
    if (t.few) stream<Lines>(t);
    else block<Lines>(t);
}

void float_tile(const FloatTile& t) {
    if (t.w->format == Format::f32) return tile_of<FloatLines>(t);
#if defined(CANTER_FLOAT_PAIRS)
    if (t.pairs) return tile_of<PairLines>(t);
#endif
    tile_of<Bf16Lines>(t);
}

inline float widened(bf16 x) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

inline bf16 narrowed(float x) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    if (x != x) return bf16{0x7fc0};
    return bf16{static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline void widen_run(const bf16* from, float* to, std::int64_t count) {
    std::int64_t i = 0;
    for (; i + Lanes::width <= count; i += Lanes::width) Lanes::store(to + i, Lanes::load_bf16(from + i));
    for (; i < count; ++i) to[i] = widened(from[i]);
}

void pack_rows(const PackRowsCall& c, std::int64_t row_begin, std::int64_t row_end) {
    const std::int64_t from_bytes = dtype_bytes(c.x_type), to_bytes = dtype_bytes(c.type);
    for (std::int64_t r = row_begin; r < row_end; ++r) {
        for (std::int64_t k = 0, place = r * c.row_stride; k < c.width; k += c.chunk, place += c.chunk_stride) {
            const std::int64_t count = k + c.chunk < c.width ? c.chunk : c.width - k;
            const char* from = static_cast<const char*>(c.x) + (r * c.x_stride + k) * from_bytes;
            char* to = static_cast<char*>(c.data) + place * to_bytes;
            if (c.x_type == c.type) __builtin_memcpy(to, from, static_cast<std::size_t>(count * to_bytes));
            else widen_run(reinterpret_cast<const bf16*>(from), reinterpret_cast<float*>(to), count);
        }
    }
}

inline Reg load_lanes(const float* p) { return Lanes::load(p); }
inline Reg load_lanes(const bf16* p) { return Lanes::load_bf16(p); }
inline void store_lanes(float* p, Reg v) { Lanes::store(p, v); }
inline void store_lanes(bf16* p, Reg v) { Lanes::store_bf16(p, v); }
inline float load_one(float x) { return x; }
inline float load_one(bf16 x) { return widened(x); }
inline void store_one(float* p, float x) { *p = x; }
inline void store_one(bf16* p, float x) { *p = narrowed(x); }

template <class Bias, class Out>
inline void store_rows(const StoreSumsCall& c) {
    const Bias* bias = static_cast<const Bias*>(c.bias);
    for (std::int64_t r = 0; r < c.rows; ++r) {
        const float* sums = c.sums + r * c.sums_stride;
        Out* out = static_cast<Out*>(c.out) + r * c.out_stride;
        std::int64_t i = 0;
        for (; i + Lanes::width <= c.outputs; i += Lanes::width) {
            const Reg sum = Lanes::load(sums + i);
            store_lanes(out + i, bias ? Lanes::add(sum, load_lanes(bias + i)) : sum);
        }
        for (; i < c.outputs; ++i) store_one(out + i, bias ? sums[i] + load_one(bias[i]) : sums[i]);
    }
}

template <class Bias>
inline void store_rows_of(const StoreSumsCall& c) {
    if (c.out_type == DType::float32) store_rows<Bias, float>(c);
    else store_rows<Bias, bf16>(c);
}

void store_sums(const StoreSumsCall& c) {
    if (c.bias_type == DType::float32) store_rows_of<float>(c);
    else store_rows_of<bf16>(c);
}

#if defined(CANTER_FLOAT_PAIRS)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

constexpr FloatKernels kFloatKernels{Lanes::few_rows, Lanes::stream_panels(1), Lanes::block_panels, kPairs, &pack_rows, &float_tile,
                                     &store_sums};

}  // namespace
}  // namespace canter
