// Tiles of quantised products, the same for every instruction set: written against `Ops`, whose vectors are as wide as a
// panel (sixteen lanes). Included once per instruction set.
//
// The float operations of an output, in this order whatever the tile: for every scale, in ascending order,
// sum = fma(dot, scale_w * scale_x, sum), and then with minima sum = fma(minimum, scale_x * sum_x, sum). Dot products are
// exact integers. So neither the other rows nor the cuts along the width change a bit.

namespace canter::CANTER_ISA {

using Codes = Ops::Codes;
using Ints = Ops::Ints;
using Floats = Ops::Floats;

// Panels read side by side for a single row. Two of five or six bits would find too few registers.
constexpr int streams_of(Format format) {
    const int bits = quant_layout(format).bits;
    return bits == 4 || bits == 8 ? Ops::kStreams : 1;
}

template <Format F>
struct Traits {
    using Panel = Ops;  // a name that depends on the format, for operations that not every instruction set has
    static constexpr Format format = F;
    static constexpr QuantLayoutInfo layout = quant_layout(F);
    static constexpr int bits = layout.bits;
    static constexpr bool super = layout.block_runs == 8, by_group = F == Format::w4, per_output = F == Format::i8;
    static constexpr bool minima = layout.minima, halves = layout.halves;
    static constexpr bool split = halves || by_group;             // a float for either half of a run: its scale, or that of x, is its own
    static constexpr bool wide = bits == 8 && Ops::kSplitsBytes;  // codes and x as 16 bits each
    static constexpr int streams = streams_of(F);
    // Unsigned codes of five bits fit the 16-bit sums less 16 only.
    static constexpr bool recentred = bits == 5 && minima && Ops::kShortSums;
    // A run in scratch: its codes, then floats [16]: scale (two with halves), minimum, and zeros as int32.
    static constexpr int code_bytes = wide ? 1024 : 512;
    static constexpr int unpacked_bytes = code_bytes + 64 * ((per_output ? 0 : halves ? 2 : 1) + (minima || by_group ? 1 : 0));
};

// A row of x: its runs and, where a format wants them so, its codes as 16 bits: (0, 2), (1, 3) of every four elements. The
// scales lie side by side then, so that nothing is read of the runs: their other codes would only fill the first cache.
struct Row {
    const RowRun* runs;
    const std::int16_t* wide;
    const float* scales;
};

// What a kernel reads codes from: the packed panel itself, while the memory is asked for what lies so many bytes ahead (0: it is not) ...
template <class T, int Ahead>
struct Packed {
    const std::uint8_t* block;  // header of the block at hand
    const std::uint8_t* at;     // codes of the run at hand
    std::int64_t block_bytes;
    int block_runs, index;      // index: of the next run in its block
    Floats d, m;

    Packed(const std::uint8_t* panel, std::int64_t bytes, std::int64_t run) : block_bytes(bytes) {
        block_runs = T::by_group ? static_cast<int>((bytes - T::layout.header) / T::layout.run_bytes()) : T::layout.block_runs;
        block = panel + quant_lead(T::format) + run / block_runs * bytes;
        index = static_cast<int>(run % block_runs);
        if constexpr (T::super || T::by_group) {
            at = block + T::layout.header + (index - 1) * T::layout.run_bytes();
            open_block();
        } else {
            at = block - T::layout.run_bytes();  // a block is one run
        }
    }

    void open_block() {
        if constexpr (T::super) d = Ops::halves_to_floats(block);
        if constexpr (T::super && T::minima) m = Ops::negate(Ops::halves_to_floats(block + 32));
    }

    // Moves to the next run.
    void next() {
        constexpr int bytes = T::layout.run_bytes();
        if constexpr (T::super || T::by_group) {
            if (index == block_runs) {
                block += block_bytes;
                index = 0;
            }
            if (index == 0) {
                at = block + T::layout.header;
                open_block();
            } else {
                at += bytes;
            }
            ++index;
        } else {
            at += T::layout.header + bytes;
            block = at - T::layout.header;
        }
        if constexpr (Ahead > 0) {
#pragma GCC unroll 16
            for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i + Ahead, 0, Ops::kLocality);
        }
    }

    // Codes of groups 2Q and 2Q + 1.
    template <int Q>
    void pair(Codes& a, Codes& b) const {
        if constexpr (T::bits == 8) {
            a = Ops::unsigned_bytes(at + 128 * Q);
            b = Ops::unsigned_bytes(at + 128 * Q + 64);
        } else {
            Ops::nibbles(at + 64 * Q, a, b);
            if constexpr (T::bits == 5) {
                const Codes high = Ops::load(at + 256);
                a = Ops::template fifth_bit<2 * Q>(a, high);
                b = Ops::template fifth_bit<2 * Q + 1>(b, high);
            }
            if constexpr (T::bits == 6) {
                const Codes high = Ops::load(at + 256 + Q / 2 * 64);
                a = Ops::template upper_bits<2 * Q % 4>(a, high);
                b = Ops::template upper_bits<2 * Q % 4 + 1>(b, high);
            }
        }
    }
    // Codes of group G in 16 bits: the even elements or the odd ones.
    template <int G, bool Odd>
    Codes wide() const {
        if constexpr (Odd) return T::Panel::odd_bytes(Ops::load(at + 64 * G));
        else return T::Panel::even_bytes(Ops::load(at + 64 * G));
    }
    template <int H>
    Floats scale() const {
        if constexpr (T::by_group) return Ops::load_floats(reinterpret_cast<const float*>(block));
        else if constexpr (T::halves) return Ops::mul(d, Ops::signed_to_floats(block + 32 + 16 * (2 * (index - 1) + H)));
        else if constexpr (T::super) return Ops::mul(d, Ops::bytes_to_floats(block + 64 + 16 * (index - 1)));
        else return Ops::halves_to_floats(block);
    }
    Floats minimum() const {
        if constexpr (T::super) return Ops::mul(m, Ops::bytes_to_floats(block + 192 + 16 * (index - 1)));
        else return Ops::halves_to_floats(block + 32);
    }
    Ints zeros() const { return Ops::bytes_to_ints(block + 64); }
};

// ... or runs of it unpacked, for many rows.
template <class T>
struct Unpacked {
    const std::uint8_t* at;

    explicit Unpacked(const std::uint8_t* scratch) : at(scratch - T::unpacked_bytes) {}
    void next() { at += T::unpacked_bytes; }
    template <int Q>
    void pair(Codes& a, Codes& b) const {
        a = Ops::load_once(at + 128 * Q);
        b = Ops::load_once(at + 128 * Q + 64);
    }
    template <int G, bool Odd>
    Codes wide() const {
        return Ops::load_once(at + 128 * G + (Odd ? 64 : 0));
    }
    template <int H>
    Floats scale() const {
        return Ops::load_floats(reinterpret_cast<const float*>(at + T::code_bytes + (T::halves ? 64 * H : 0)));
    }
    Floats minimum() const { return Ops::load_floats(reinterpret_cast<const float*>(at + T::code_bytes + (T::halves ? 128 : 64))); }
    Ints zeros() const { return Ops::load_ints(at + T::code_bytes + 64); }
};

template <class T, int Q>
inline void unpack_pair(const Packed<T, 0>& source, std::uint8_t* out) {
    if constexpr (T::wide) {
        Ops::store(out + 256 * Q, source.template wide<2 * Q, false>());
        Ops::store(out + 256 * Q + 64, source.template wide<2 * Q, true>());
        Ops::store(out + 256 * Q + 128, source.template wide<2 * Q + 1, false>());
        Ops::store(out + 256 * Q + 192, source.template wide<2 * Q + 1, true>());
    } else {
        Codes a, b;
        source.template pair<Q>(a, b);
        Ops::store(out + 128 * Q, a);
        Ops::store(out + 128 * Q + 64, b);
    }
}

template <class T>
inline void unpack_runs(Packed<T, 0> source, std::int64_t runs, std::uint8_t* out) {
    for (std::int64_t i = 0; i < runs; ++i, out += T::unpacked_bytes) {
        source.next();
        unpack_pair<T, 0>(source, out);
        unpack_pair<T, 1>(source, out);
        unpack_pair<T, 2>(source, out);
        unpack_pair<T, 3>(source, out);
        float* floats = reinterpret_cast<float*>(out + T::code_bytes);
        if constexpr (!T::per_output) Ops::store_floats(floats, source.template scale<0>());
        if constexpr (T::halves) Ops::store_floats(floats + 16, source.template scale<1>());
        if constexpr (T::minima) Ops::store_floats(floats + (T::halves ? 32 : 16), source.minimum());
        if constexpr (T::by_group) Ops::store_ints(out + T::code_bytes + 64, source.zeros());
    }
}

// Where products are of signed bytes, codes of eight bits are taken as they are, and have no offset.
template <class O>
inline constexpr bool kSignedBytes = requires { O::kSignedBytes; };

template <class T, int H>
inline Ops::Sum start(const RowRun& x) {
    if constexpr (T::format == Format::q4_0) return Ops::start(&x.start8);
    else if constexpr (T::format == Format::q5_0 || T::recentred) return Ops::start(&x.start16);
    else if constexpr (T::format == Format::q6_k) return Ops::start(&x.start32[H]);
    else if constexpr (T::bits == 8 && !T::wide && !kSignedBytes<Ops>) return Ops::start(&x.extra);
    else return Ops::zero_sum();
}

// The scale and the sum of x for half H of a run, or for all of it.
template <class T, int H>
inline const float* scale_of(const RowRun& x) {
    return T::by_group && H == 1 ? &x.second_scale : &x.scale;
}
template <class T, int H>
inline const std::int32_t* sum_of(const RowRun& x) {
    return T::by_group && H == 1 ? &x.second_sum : &x.sum;
}

// Sums of R rows and P panels over `runs` runs; `sums` holds the totals so far, [R][P][16].
template <class T, int R, int P, class Source>
inline void accumulate(Source (&source)[P], const Row (&rows)[R], std::int64_t runs, float* sums) {
    constexpr bool held = R * P <= Ops::kHeldSums;
    Floats totals[R][P];
    if constexpr (held) {
#pragma GCC unroll 32
        for (int i = 0; i < R * P; ++i) totals[i / P][i % P] = Ops::load_floats(sums + 16 * i);
    }
    const auto add = [&](int r, int p, Floats dot, Floats scale) {
        if constexpr (held) totals[r][p] = Ops::fma(dot, scale, totals[r][p]);
        else Ops::store_floats(sums + 16 * (r * P + p), Ops::fma(dot, scale, Ops::load_floats(sums + 16 * (r * P + p))));
    };
    for (std::int64_t i = 0; i < runs; ++i) {
        if constexpr (T::wide) {
            Ints dots[R][P];
#pragma GCC unroll 32
            for (int j = 0; j < R * P; ++j) dots[j / P][j % P] = T::Panel::zero_ints();
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) source[p].next();
            const auto half_group = [&]<int G, bool Odd>() {
                Codes codes[P];
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p) codes[p] = source[p].template wide<G, Odd>();
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const std::int16_t* x = rows[r].wide + 32 * i + 4 * G + (Odd ? 2 : 0);
#pragma GCC unroll 4
                    for (int p = 0; p < P; ++p) dots[r][p] = T::Panel::add_wide(dots[r][p], codes[p], x);
                }
            };
            const auto group = [&]<int G>() {
                half_group.template operator()<G, false>();
                half_group.template operator()<G, true>();
            };
            group.template operator()<0>();
            group.template operator()<1>();
            group.template operator()<2>();
            group.template operator()<3>();
            group.template operator()<4>();
            group.template operator()<5>();
            group.template operator()<6>();
            group.template operator()<7>();
            Floats scale[P];
            if constexpr (!T::per_output) {
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p) scale[p] = source[p].template scale<0>();
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Floats scale_x = Ops::spread(rows[r].scales + i);
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p) {
                    if constexpr (T::per_output) add(r, p, Ops::to_floats(dots[r][p]), scale_x);
                    else add(r, p, Ops::to_floats(dots[r][p]), Ops::mul(scale[p], scale_x));
                }
            }
        } else {
            typename Ops::Sum dots[R][P];
            const auto begin = [&]<int H>() {
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
                    for (int p = 0; p < P; ++p) dots[r][p] = start<T, H>(rows[r].runs[i]);
                }
            };
            const auto pair = [&]<int Q>() {
                Codes a[P], b[P];
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p) source[p].template pair<Q>(a[p], b[p]);
                const auto add_group = [&](const Codes(&codes)[P], int at) {
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
                        for (int p = 0; p < P; ++p) dots[r][p] = Ops::add(dots[r][p], codes[p], rows[r].runs[i].codes + at);
                    }
                };
                add_group(a, 8 * Q);
                add_group(b, 8 * Q + 4);
            };
            const auto end = [&]<int H>() {
                Floats scale[P], minimum[P];
                Ints zeros[P];
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p) {
                    if constexpr (!T::per_output) scale[p] = source[p].template scale<H>();
                    if constexpr (T::minima) minimum[p] = source[p].minimum();
                    if constexpr (T::by_group) zeros[p] = source[p].zeros();
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const RowRun& x = rows[r].runs[i];
#pragma GCC unroll 4
                    for (int p = 0; p < P; ++p) {
                        Ints total = Ops::total(dots[r][p]);
                        if constexpr (T::recentred) total = T::Panel::add_spread(total, &x.extra);
                        if constexpr (T::by_group) total = Ops::less_product(total, zeros[p], sum_of<T, H>(x));
                        const Floats dot = Ops::to_floats(total), scale_x = Ops::spread(scale_of<T, H>(x));
                        if constexpr (T::per_output) {
                            add(r, p, dot, scale_x);
                        } else {
                            const Floats product = Ops::mul(scale[p], scale_x);
                            if constexpr (!T::minima) {
                                add(r, p, dot, product);
                            } else if constexpr (held) {
                                totals[r][p] = Ops::fma(minimum[p], Ops::spread(&x.scaled_sum), Ops::fma(dot, product, totals[r][p]));
                            } else {
                                float* sum = sums + 16 * (r * P + p);
                                const Floats so_far = Ops::fma(dot, product, Ops::load_floats(sum));
                                Ops::store_floats(sum, Ops::fma(minimum[p], Ops::spread(&x.scaled_sum), so_far));
                            }
                        }
                    }
                }
            };
            begin.template operator()<0>();
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) source[p].next();
            pair.template operator()<0>();
            pair.template operator()<1>();
            if constexpr (T::split) {
                end.template operator()<0>();
                begin.template operator()<1>();
            }
            pair.template operator()<2>();
            pair.template operator()<3>();
            end.template operator()<T::split ? 1 : 0>();
        }
    }
    if constexpr (held) {
#pragma GCC unroll 32
        for (int i = 0; i < R * P; ++i) Ops::store_floats(sums + 16 * i, totals[i / P][i % P]);
    }
}

// Runs unpacked at a time: with the rows of a tile they fit the first-level cache.
inline constexpr std::int64_t kChunkRuns = 16;

inline constexpr int kScratchRun = 1024 + 64 * 3;
inline constexpr int kWideRun = 64 + 4;  // bytes of a run's codes in 16 bits, and of its scale

inline std::int64_t quant_scratch(Format format, std::int64_t width, std::int64_t rows) {
    const std::int64_t runs = rows <= Ops::kFewRows ? row_runs(width) : kChunkRuns;
    const std::int64_t wide = Ops::kSplitsBytes && quant_layout(format).bits == 8 ? rows * runs * kWideRun : 0;
    return wide + (rows <= Ops::kFewRows ? 0 : Ops::kTilePanels * kChunkRuns * kScratchRun);
}

inline int quant_streams(Format format) { return streams_of(format); }

// Codes of a row as 16 bits, and its scales.
inline void widen_row(const RowRun* runs, std::int64_t count, std::int16_t* out, float* scales) {
    for (std::int64_t i = 0; i < count; ++i, out += 32) {
        Ops::widen_row(runs[i].codes, out);
        scales[i] = runs[i].scale;
    }
}

template <class T>
inline void scale_outputs(const std::uint8_t* panel, float* sums) {
    if constexpr (T::per_output) {
        Ops::store_floats(sums, Ops::mul(Ops::load_floats(sums), Ops::load_floats(reinterpret_cast<const float*>(panel))));
    }
}

// R rows times panel n of the tile and, for two, the one that lies apart.
template <class T, int R, int P>
inline void side_by_side(const QuantTile& t, std::int64_t block_bytes, std::int64_t panel_bytes, const Row (&rows)[R], std::int64_t n) {
    alignas(64) float sums[R * P * 16] = {};
    const auto place = [&](int p) { return t.w->data + (t.panel_begin + n + p * t.apart) * panel_bytes; };
    if constexpr (P == 1) {
        using Source = Packed<T, Ops::kAhead>;
        Source source[1] = {Source(place(0), block_bytes, 0)};
        accumulate<T, R, 1>(source, rows, row_runs(t.w->width), sums);
    } else {
        // Codes of four bits take long enough to be worth asking for; of the others the machine itself keeps ahead.
        using Source = Packed<T, T::bits == 4 ? Ops::kAheadOfTwo : 0>;
        Source source[2] = {Source(place(0), block_bytes, 0), Source(place(1), block_bytes, 0)};
        accumulate<T, R, 2>(source, rows, row_runs(t.w->width), sums);
    }
    for (int i = 0; i < R * P; ++i) {
        const int r = i / P, p = i % P;
        scale_outputs<T>(place(p), sums + 16 * i);
        Ops::store_floats(t.out + r * t.out_stride + (n + p * (t.panel_end - t.panel_begin)) * 16, Ops::load_floats(sums + 16 * i));
    }
}

template <class T, int R>
inline void few_rows(const QuantTile& t, std::int64_t block_bytes, std::int64_t panel_bytes, const RowRun* x, std::int64_t pitch,
                     std::uint8_t* scratch) {
    const std::int64_t runs = row_runs(t.w->width);
    Row rows[R];
    for (int r = 0; r < R; ++r) {
        rows[r] = {x + r * pitch, nullptr, nullptr};
        if constexpr (T::wide) {
            auto* wide = reinterpret_cast<std::int16_t*>(scratch) + r * runs * 32;
            float* scales = reinterpret_cast<float*>(scratch + R * runs * 64) + r * runs;
            widen_row(rows[r].runs, runs, wide, scales);
            rows[r].wide = wide;
            rows[r].scales = scales;
        }
    }
    const std::int64_t panels = t.panel_end - t.panel_begin;
    if constexpr (R == 1 && T::streams == 2) {
        if (t.apart > 0) {
            for (std::int64_t n = 0; n < panels; ++n) side_by_side<T, R, 2>(t, block_bytes, panel_bytes, rows, n);
            return;
        }
    }
    for (std::int64_t n = 0; n < panels; ++n) side_by_side<T, R, 1>(t, block_bytes, panel_bytes, rows, n);
}

// R rows times P unpacked panels over `runs` runs, added to `out` or, for the first of them, set there.
template <class T, int R, int P>
inline void tile_rows(const std::uint8_t* unpacked, const RowRun* x, std::int64_t pitch, const std::int16_t* wide, const float* scales,
                      std::int64_t runs, float* out, std::int64_t out_stride, bool first) {
    alignas(64) float sums[R * P * 16];
    Row rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const std::int64_t skipped = T::wide ? r * kChunkRuns : 0;
        rows[r] = {x + r * pitch, wide + skipped * 32, scales + skipped};
        for (int p = 0; p < P; ++p) {
            Ops::store_floats(sums + 16 * (r * P + p), first ? Ops::zero_floats() : Ops::load_floats(out + r * out_stride + 16 * p));
        }
    }
    if constexpr (P == 1) {
        Unpacked<T> source[1] = {Unpacked<T>(unpacked)};
        accumulate<T, R, 1>(source, rows, runs, sums);
    } else {
        Unpacked<T> source[2] = {Unpacked<T>(unpacked), Unpacked<T>(unpacked + kChunkRuns * T::unpacked_bytes)};
        accumulate<T, R, 2>(source, rows, runs, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) Ops::store_floats(out + r * out_stride + 16 * p, Ops::load_floats(sums + 16 * (r * P + p)));
    }
}

#if defined(CANTER_AMX)
#include "gemm/quant/tiles_amx.h"
#endif

// The memory is asked for what will be unpacked next while rows are multiplied by what is unpacked, a few lines with every tile.
struct Upcoming {
    const std::uint8_t* first;        // of the chunk in its first panel
    std::int64_t bytes, panel_bytes;  // of the chunk in one panel; from panel to panel

    // The share of rows [begin, begin + count) of `rows`.
    template <int P>
    void ask(std::int64_t begin, std::int64_t count, std::int64_t rows) const {
        const std::int64_t lines = (bytes + 63) / 64, from = lines * begin / rows, to = lines * (begin + count) / rows;
        for (int p = 0; p < P; ++p) {
            for (std::int64_t i = from; i < to; ++i) __builtin_prefetch(first + p * panel_bytes + i * 64, 0, 2);
        }
    }
};

template <class T, int P>
inline void tile_panels(const std::uint8_t* unpacked, const RowRun* x, std::int64_t pitch, const std::int16_t* wide, const float* scales,
                        std::int64_t rows, std::int64_t runs, float* out, std::int64_t out_stride, bool first, const Upcoming& next) {
    std::int64_t r = 0;
#if defined(CANTER_AMX)
    next.ask<P>(0, rows, rows);
    r = all_blocks<T, P>(unpacked, x, pitch, rows, runs, out, out_stride, first);
#endif
    const auto tiles = [&]<int R>() {
        for (; r + R <= rows; r += R) {
            const std::int64_t skipped = T::wide ? r * kChunkRuns : 0;
#if !defined(CANTER_AMX)
            next.ask<P>(r, R, rows);
#endif
            tile_rows<T, R, P>(unpacked, x + r * pitch, pitch, wide + skipped * 32, scales + skipped, runs, out + r * out_stride,
                               out_stride, first);
        }
    };
    tiles.template operator()<Ops::kTileRows>();
    if constexpr (Ops::kTileRows > 4) tiles.template operator()<4>();
    if constexpr (Ops::kTileRows > 2) tiles.template operator()<2>();
    tiles.template operator()<1>();
}

template <class T>
inline void many_rows(const QuantTile& t, std::int64_t block_bytes, std::int64_t panel_bytes, const RowRun* x, std::int64_t pitch,
                      std::uint8_t* scratch) {
    const std::int64_t runs = row_runs(t.w->width), rows = t.row_end - t.row_begin;
    auto* wide = reinterpret_cast<std::int16_t*>(scratch + Ops::kTilePanels * kChunkRuns * kScratchRun);
    auto* scales = reinterpret_cast<float*>(wide + (T::wide ? rows * kChunkRuns * 32 : 0));
#if defined(CANTER_AMX)
    const TilesInUse tiles;
#endif
    // Chunks outermost: a chunk of all the tile's rows stays in the second-level cache while the panels pass by.
    for (std::int64_t begin = 0; begin < runs; begin += kChunkRuns) {
        const std::int64_t count = begin + kChunkRuns < runs ? kChunkRuns : runs - begin;
        if constexpr (T::wide) {
            for (std::int64_t r = 0; r < rows; ++r) {
                widen_row(x + r * pitch + begin, count, wide + r * (kChunkRuns * 32), scales + r * kChunkRuns);
            }
        }
        std::int64_t n = t.panel_begin;
        const auto panels = [&]<int P>() {
            for (; n + P <= t.panel_end; n += P) {
                for (int p = 0; p < P; ++p) {
                    unpack_runs<T>(Packed<T, 0>(t.w->data + (n + p) * panel_bytes, block_bytes, begin), count,
                                   scratch + p * kChunkRuns * T::unpacked_bytes);
                }
                float* out = t.out + (n - t.panel_begin) * 16;
                // Next come the same runs of the next panels, or the first panels' next runs, or what may be the next tile.
                const bool along = n + P < t.panel_end, last = begin + count == runs;
                const std::int64_t panel = along ? n + P : last ? t.panel_end : t.panel_begin;
                const std::int64_t run = along ? begin : last ? 0 : begin + count;
                const Upcoming next{t.w->data + panel * panel_bytes + panel_bytes * run / runs, panel_bytes * count / runs, panel_bytes};
                tile_panels<T, P>(scratch, x + begin, pitch, wide, scales, rows, count, out, t.out_stride, begin == 0, next);
            }
        };
        if constexpr (Ops::kTilePanels > 1) panels.template operator()<Ops::kTilePanels>();
        panels.template operator()<1>();
    }
    if constexpr (T::per_output) {
        for (std::int64_t n = t.panel_begin; n < t.panel_end; ++n) {
            for (std::int64_t r = 0; r < rows; ++r) {
                scale_outputs<T>(t.w->data + n * panel_bytes, t.out + r * t.out_stride + (n - t.panel_begin) * 16);
            }
        }
    }
}

template <Format F>
inline void quant_tile_of(const QuantTile& t, std::int64_t block_bytes, std::int64_t panel_bytes, std::uint8_t* scratch) {
    using T = Traits<F>;
    const std::int64_t pitch = row_pitch(t.w->width);
    const RowRun* x = static_cast<const RowRun*>(t.rows) + t.row_begin * pitch;
    // Up to kFewRows rows a panel is read as it lies, once; more rows pay for unpacking it.
    const std::int64_t rows = t.row_end - t.row_begin;
    if (rows <= 0) return;
    if (rows == 1) return few_rows<T, 1>(t, block_bytes, panel_bytes, x, pitch, scratch);
    if constexpr (Ops::kFewRows == 4) {
        if (rows == 2) return few_rows<T, 2>(t, block_bytes, panel_bytes, x, pitch, scratch);
        if (rows == 3) return few_rows<T, 3>(t, block_bytes, panel_bytes, x, pitch, scratch);
        if (rows == 4) return few_rows<T, 4>(t, block_bytes, panel_bytes, x, pitch, scratch);
    }
    many_rows<T>(t, block_bytes, panel_bytes, x, pitch, scratch);
}

inline void quant_tile(const QuantTile& t, std::int64_t block_bytes, std::int64_t panel_bytes, std::uint8_t* scratch) {
    switch (t.w->format) {
        case Format::i8: return quant_tile_of<Format::i8>(t, block_bytes, panel_bytes, scratch);
        case Format::w4: return quant_tile_of<Format::w4>(t, block_bytes, panel_bytes, scratch);
        case Format::q4_0: return quant_tile_of<Format::q4_0>(t, block_bytes, panel_bytes, scratch);
        case Format::q4_1: return quant_tile_of<Format::q4_1>(t, block_bytes, panel_bytes, scratch);
        case Format::q5_0: return quant_tile_of<Format::q5_0>(t, block_bytes, panel_bytes, scratch);
        case Format::q5_1: return quant_tile_of<Format::q5_1>(t, block_bytes, panel_bytes, scratch);
        case Format::q8_0: return quant_tile_of<Format::q8_0>(t, block_bytes, panel_bytes, scratch);
        case Format::q4_k: return quant_tile_of<Format::q4_k>(t, block_bytes, panel_bytes, scratch);
        case Format::q5_k: return quant_tile_of<Format::q5_k>(t, block_bytes, panel_bytes, scratch);
        case Format::q6_k: return quant_tile_of<Format::q6_k>(t, block_bytes, panel_bytes, scratch);
        default: return;
    }
}

// --- x to quantised rows ---

inline const float* load_run(const float* x, std::int64_t count, float* space) {
    if (count == kRun) return x;
    for (std::int64_t i = 0; i < kRun; ++i) space[i] = i < count ? x[i] : 0.0f;
    return space;
}
inline const float* load_run(const bf16* x, std::int64_t count, float* space) {
    if (count == kRun) {
        Ops::widen_bf16(x, space);
        return space;
    }
    for (std::int64_t i = 0; i < kRun; ++i) {
        space[i] = __builtin_bit_cast(float, i < count ? static_cast<std::uint32_t>(x[i].bits) << 16 : 0u);
    }
    return space;
}

// Codes of a run, with one scale. Values that no scale of a normal float could hold count as zero. A value that isn't finite makes
// the scale NaN, and so every output of the row.
inline void quantize_values(const float* values, RowRun& out) {
    const std::int32_t highest = Ops::highest_bits(values);  // of the magnitudes' bits, which order as they do
    const bool damaged = highest >= 0x7f800000;
    float inverse = 0.0f, scale = 0.0f;
    if (damaged) {
        scale = __builtin_nanf("");
    } else if (highest >= 0x06000000) {  // about 2.4e-35
        const float amax = __builtin_bit_cast(float, highest);
        inverse = 127.0f / amax;
        scale = amax / 127.0f;
    }
    Ops::quantize_run(values, inverse, damaged, out);
    out.scale = scale;
}

template <bool Halves, class X>
inline void quantize_run(const X* x, std::int64_t elements, RowRun& out) {
    constexpr std::size_t half = kRun / 2;
    alignas(64) float space[kRun];
    const float* values = load_run(x, elements, space);
    if constexpr (Halves) {
        alignas(64) float one[kRun] = {};
        RowRun second;
        std::memcpy(one, values + half, half * sizeof(float));
        quantize_values(one, second);
        std::memcpy(one, values, half * sizeof(float));
        quantize_values(one, out);
        std::memcpy(out.codes + half, second.codes, half);
        out.second_scale = second.scale;
        out.second_sum = second.sum;
    } else {
        quantize_values(values, out);
        out.scaled_sum = out.scale * static_cast<float>(out.sum);
        if (!Ops::kShortSums) out.extra = -128 * out.sum;
    }
}

template <bool Halves, class X>
inline void quantize_row(const X* x, std::int64_t width, RowRun* out) {
    const std::int64_t whole = width / kRun;
    for (std::int64_t i = 0; i < whole; ++i) quantize_run<Halves>(x + i * kRun, kRun, out[i]);
    if (width % kRun != 0) quantize_run<Halves>(x + whole * kRun, width % kRun, out[whole]);
}

template <class X>
inline void quantize_rows_of(const QuantizeCall& call, std::int64_t row_begin, std::int64_t row_end) {
    for (std::int64_t r = row_begin; r < row_end; ++r) {
        const X* x = static_cast<const X*>(call.x) + r * call.x_stride;
        RowRun* out = static_cast<RowRun*>(call.rows) + r * row_pitch(call.width);
        if (call.family == RowFamily::halves) quantize_row<true>(x, call.width, out);
        else quantize_row<false>(x, call.width, out);
    }
}

inline void quantize_rows(const QuantizeCall& call, std::int64_t row_begin, std::int64_t row_end) {
    if (call.x_type == DType::float32) quantize_rows_of<float>(call, row_begin, row_end);
    else quantize_rows_of<bf16>(call, row_begin, row_end);
}

}  // namespace canter::CANTER_ISA
