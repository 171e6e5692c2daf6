// Attention for one instruction set, and its table. Expects Vec and the codecs, CANTER_ISA and CANTER_TABLE. Calls no library
// templates: the linker might keep the copy compiled here for code that must run on any machine.

#include "attention/kernels.h"
#include "isa/vec_math.h"

namespace canter::CANTER_ISA {

// ---- writing ----

// Nearest fp8_e4m3, ties to even, beyond the greatest the greatest; NaN stays.
inline std::uint8_t fp8_code(float x) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    const std::uint32_t size = bits & 0x7fffffffu;
    float small;
    __builtin_memcpy(&small, &size, sizeof small);
    small += 16384.0f;  // its last place is the step of the codes below 2^-6
    std::uint32_t below;
    __builtin_memcpy(&below, &small, sizeof below);
    below -= 0x46800000u;
    const std::uint32_t above = ((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - (120u << 3);
    std::uint32_t code = size < 0x3c800000u ? below : above;
    code = size > 0x43e00000u ? 0x7eu : code;
    code = size > 0x7f800000u ? 0x7fu : code;
    return static_cast<std::uint8_t>(code | ((bits >> 24) & 0x80u));
}

inline void encode(Reg v, float, float* out) { Vec::store(out, v); }
inline void encode(Reg v, float, bf16* out) { Vec::store(out, v); }
// Beyond the greatest the greatest; NaN stays.
inline void encode(Reg v, float, f16* out) {
    const Reg most = Vec::set1(65504.0f), least = Vec::set1(-65504.0f);
    CodecF16::store(out, Vec::max(least, Vec::min(most, v)));
}
inline void encode(Reg v, float, std::uint8_t* out) {
    float lanes[Vec::width];
    Vec::store(lanes, v);
    for (int i = 0; i < Vec::width; ++i) out[i] = fp8_code(lanes[i]);
}
inline void encode(Reg v, float scale, std::int8_t* out) {
    float lanes[Vec::width];
    const Reg codes = scale == 0 ? Vec::zero() : Vec::round(Vec::div(v, Vec::set1(scale)));
    Vec::store(lanes, Vec::max(Vec::min(codes, Vec::set1(127.0f)), Vec::set1(-127.0f)));
    for (int i = 0; i < Vec::width; ++i) out[i] = static_cast<std::int8_t>(lanes[i]);
}

// What an int8 row's codes count: its greatest magnitude is 127 of them. NaN where the row holds one.
template <class T>
inline float find_scale(const T* row, std::int64_t width) {
    Reg highest = Vec::zero(), check = Vec::zero();
    for (std::int64_t d = 0; d < width; d += Vec::width) {
        const Reg v = load_some(row + d, width - d);
        highest = Vec::max(highest, Vec::abs(v));
        check = Vec::add(check, Vec::mul(v, Vec::zero()));
    }
    return Vec::highest(highest) / 127.0f + Vec::sum(check);
}

// `at`: where the head's keys or values begin in the block; Lanes elements of d lie together, `apart` elements from the next.
template <int Lanes, class T, class E>
inline void write_row(const T* row, std::int64_t width, float scale, E* out, std::int64_t apart) {
    for (std::int64_t d = 0; d < width; d += Vec::width) {
        E codes[Vec::width];
        const std::int64_t count = width - d < Vec::width ? width - d : Vec::width;
        encode(load_some(row + d, width - d), scale, codes);
        for (std::int64_t i = 0; i < count; i += Lanes) __builtin_memcpy(out + (d + i) / Lanes * apart, codes + i, Lanes * sizeof(E));
    }
}

template <class T, class C>
inline void write_kv_rows(const WriteKVArgs& a, std::int64_t begin, std::int64_t end) {
    using E = typename C::Element;
    for (std::int64_t t = begin; t < end; ++t) {
        if (a.slots[t] < 0) continue;
        const std::int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
        for (std::int64_t h = 0; h < a.heads; ++h) {
            const T* k = static_cast<const T*>(a.k) + t * a.k_stride + h * a.head_dim;
            const T* v = static_cast<const T*>(a.v) + t * a.v_stride + h * a.value_dim;
            E* keys = reinterpret_cast<E*>(static_cast<char*>(a.k_cache.data) + block * a.k_cache.block_bytes) +
                h * a.block_size * a.head_dim + offset * C::lanes;
            E* values = reinterpret_cast<E*>(static_cast<char*>(a.v_cache.data) + block * a.v_cache.block_bytes) +
                (h * a.block_size + offset) * a.value_dim;
            float k_scale = 1.0f, v_scale = 1.0f;
            if (a.cache_type == CacheType::int8) {
                k_scale = find_scale(k, a.head_dim);
                v_scale = find_scale(v, a.value_dim);
                a.k_scale.data[block * a.k_scale.block_stride + h * a.block_size + offset] = k_scale;
                a.v_scale.data[block * a.v_scale.block_stride + h * a.block_size + offset] = v_scale;
            }
            write_row<C::lanes>(k, a.head_dim, k_scale, keys, a.block_size * C::lanes);
            write_row<C::step>(v, a.value_dim, v_scale, values, C::step);
        }
    }
}

template <class T>
inline void write_kv_as(const WriteKVArgs& a, std::int64_t begin, std::int64_t end) {
    switch (a.cache_type) {
        case CacheType::float32: return write_kv_rows<T, CodecF32>(a, begin, end);
        case CacheType::bfloat16: return write_kv_rows<T, CodecBF16>(a, begin, end);
        case CacheType::fp8_e4m3: return write_kv_rows<T, CodecFP8>(a, begin, end);
        case CacheType::int8: return write_kv_rows<T, CodecI8>(a, begin, end);
        case CacheType::float16: return write_kv_rows<T, CodecF16>(a, begin, end);
    }
}

inline void write_kv(const WriteKVArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? write_kv_as<float>(a, begin, end) : write_kv_as<bf16>(a, begin, end);
}

// ---- register tiles ----

// Rows whose sums stay in registers together, and registers of keys (or of a value) beside them: enough sums to hide the latency
// of their additions, and few enough that keys, and one query's element, find registers too.
inline constexpr int kTileRows = Vec::registers > 16 ? 8 : 6;
// `split`: keys and values take registers in pairs.
inline constexpr int tile_vectors(int rows, bool split) { return rows > (Vec::registers > 16 ? 4 : split ? 2 : 3) ? 2 : 4; }

inline constexpr int kPanelVectors = static_cast<int>(kPanel) / Vec::width;
inline constexpr int kLine = 64;  // bytes of a cache line
inline constexpr std::int64_t kScoreStride = kSpan + 16;  // so that rows do not fall on the same cache sets
inline constexpr std::int64_t kValueKeys = 64;  // keys whose values stay in the first-level cache while rows walk over them

// Keys of a panel: Vec::width of them from each pointer on; C::lanes elements of d lie together, the next ones `row` bytes
// further, and a step of the loops, C::step elements, is `stride` bytes. While the scores are
// computed, memory is asked for what comes next, for blocks lie scattered and the machine can't guess it: `ahead` and `after`
// are two such places for each pointer, walked through by ahead_stride and after_stride bytes.
struct PanelKeys {
    const char* at[kPanelVectors];
    const char* ahead[kPanelVectors];
    const char* after[kPanelVectors];
    std::int64_t row, stride, ahead_stride, after_stride;
};

template <class C, int R, int V, int H>
__attribute__((always_inline)) inline void score_step(const float* q, const char** at, std::int64_t row, Reg (*sums)[V]) {
    // Two-byte elements are read again for each of them: kept in registers, they would push out sums.
    if constexpr (R < V) {
        Reg x[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) x[r] = Vec::set1(q[r]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            if constexpr (C::step == 2) asm("" : "+r"(at[v]));
            const Reg k = C::template key<H>(at[v], row);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) sums[r][v] = Vec::fma(x[r], k, sums[r][v]);
        }
    } else {
        Reg k[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            if constexpr (C::step == 2) asm("" : "+r"(at[v]));
            k[v] = C::template key<H>(at[v], row);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Reg x = Vec::set1(q[r]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] = Vec::fma(x, k[v], sums[r][v]);
        }
    }
}

// Scores of R rows and V registers of keys. q holds [D][R].
template <class C, int R, int V, bool Ahead>
inline void score_tile(const float* q, const PanelKeys& keys, int first, std::int64_t steps, float* out) {
    const std::int64_t stride = keys.stride, row = keys.row;
    Reg sums[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v] = Vec::zero();
    }
    const char* at[V];
    const char* far[V];
    const char* farther[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
        at[v] = keys.at[first + v];
        far[v] = keys.ahead[first + v];
        farther[v] = keys.after[first + v];
    }
    for (std::int64_t s = 0; s < steps; ++s, q += R * C::step) {
        if constexpr (Ahead) {
#pragma GCC unroll 8
            for (int v = 0; v < V; v += kLine / 4 / Vec::width) {
                __builtin_prefetch(far[v], 0, 2);
                __builtin_prefetch(farther[v], 0, 2);
                far[v] += keys.ahead_stride;
                farther[v] += keys.after_stride;
            }
        }
        score_step<C, R, V, 0>(q, at, row, sums);
        if constexpr (C::step >= 2) score_step<C, R, V, 1>(q + R, at, row, sums);
        if constexpr (C::step == 4) {
            score_step<C, R, V, 2>(q + 2 * R, at, row, sums);
            score_step<C, R, V, 3>(q + 3 * R, at, row, sums);
        }
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) at[v] += stride;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) Vec::store(out + r * kScoreStride + v * Vec::width, sums[r][v]);
    }
}

template <class C, int R>
inline void score_rows(const float* q, const PanelKeys& keys, bool ahead, std::int64_t steps, float* out) {
    // Four elements are taken apart at once, and wait in registers.
    constexpr int most = C::step == 4 || kPanelVectors < 4 ? 2 : 4, fitting = tile_vectors(R, C::split);
    constexpr int V = fitting < most ? fitting : most;
    for (int v = 0; v < kPanelVectors; v += V) {
        if (ahead) score_tile<C, R, V, true>(q, keys, v, steps, out + v * Vec::width);
        else score_tile<C, R, V, false>(q, keys, v, steps, out + v * Vec::width);
    }
}

template <class C>
inline void score_panel(int rows, const float* q, const PanelKeys& keys, bool ahead, std::int64_t steps, float* out) {
    switch (rows) {
        case 1: return score_rows<C, 1>(q, keys, ahead, steps, out);
        case 2: return score_rows<C, 2>(q, keys, ahead, steps, out);
        case 3: return score_rows<C, 3>(q, keys, ahead, steps, out);
        case 4: return score_rows<C, 4>(q, keys, ahead, steps, out);
        case 5: return score_rows<C, 5>(q, keys, ahead, steps, out);
        case 6: return score_rows<C, 6>(q, keys, ahead, steps, out);
        default: break;
    }
    if constexpr (kTileRows > 6) {
        if (rows == 7) return score_rows<C, 7>(q, keys, ahead, steps, out);
        if (rows == 8) return score_rows<C, 8>(q, keys, ahead, steps, out);
    }
}

// The memory answers few questions at a time: what is asked ahead for a panel or a run of values is spread over so many of the
// row blocks that use it.
inline constexpr std::int64_t kAskers = 2;

// Values of keys that lie in one block, `stride` elements apart. `ahead`: where to ask the memory for `each` bytes for each element
// of d meanwhile, or null.
template <class E>
struct ValueRun {
    const E* at;
    std::int64_t count;
    const char* ahead;
    std::int64_t each;
};

// Add the weighted values of the runs' keys, V registers of d, to the sums of R rows.
template <class C, int R, int V>
inline void value_tile(const float* weights, const ValueRun<typename C::Element>* runs, int num_runs, std::int64_t d, std::int64_t stride,
                       float* sums, std::int64_t sum_stride) {
    constexpr bool split = C::split && V % 2 == 0;  // even and odd elements of d in registers of their own
    Reg total[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) total[r][v] = Vec::load(sums + r * sum_stride + d + v * Vec::width);
    }
    if constexpr (split) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
            for (int v = 0; v < V; v += 2) C::part(total[r][v], total[r][v + 1]);
        }
    }
    for (int i = 0; i < num_runs; ++i) {
        const typename C::Element* at = runs[i].at + d;
        const float* end = weights + runs[i].count;
        if (runs[i].ahead) {
            const std::int64_t first = d * runs[i].each, last = first + V * Vec::width * runs[i].each;
            for (std::int64_t b = first; b < last; b += kLine) __builtin_prefetch(runs[i].ahead + b, 0, 2);
        }
        for (; weights < end; ++weights, at += stride) {
            if constexpr (R < V) {
                Reg w[R];
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) w[r] = Vec::set1(weights[r * kScoreStride]);
                constexpr int together = split ? 2 : 1;
#pragma GCC unroll 8
                for (int v = 0; v < V; v += together) {
                    Reg value[together];
                    if constexpr (split) C::load_split(at + v * Vec::width, value[0], value[1]);
                    else value[0] = C::load(at + v * Vec::width);
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
                        for (int i = 0; i < together; ++i) total[r][v + i] = Vec::fma(w[r], value[i], total[r][v + i]);
                    }
                }
                continue;
            }
            Reg value[V];
            if constexpr (split) {
#pragma GCC unroll 8
                for (int v = 0; v < V; v += 2) C::load_split(at + v * Vec::width, value[v], value[v + 1]);
            } else {
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) value[v] = C::load(at + v * Vec::width);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Reg w = Vec::set1(weights[r * kScoreStride]);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) total[r][v] = Vec::fma(w, value[v], total[r][v]);
            }
        }
    }
    if constexpr (split) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
            for (int v = 0; v < V; v += 2) C::join(total[r][v], total[r][v + 1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) Vec::store(sums + r * sum_stride + d + v * Vec::width, total[r][v]);
    }
}

template <class C, int R>
inline void value_rows(const float* weights, const ValueRun<typename C::Element>* runs, int num_runs, std::int64_t width,
                       std::int64_t stride, float* sums) {
    constexpr int V = tile_vectors(R, C::split);
    std::int64_t d = 0;
    for (; d + V * Vec::width <= width; d += V * Vec::width) value_tile<C, R, V>(weights, runs, num_runs, d, stride, sums, width);
    if constexpr (V > 2) {
        for (; d + 2 * Vec::width <= width; d += 2 * Vec::width) value_tile<C, R, 2>(weights, runs, num_runs, d, stride, sums, width);
    }
    for (; d < width; d += Vec::width) value_tile<C, R, 1>(weights, runs, num_runs, d, stride, sums, width);
}

template <class C>
inline void value_panel(int rows, const float* weights, const ValueRun<typename C::Element>* runs, int num_runs, std::int64_t width,
                        std::int64_t stride, float* sums) {
    switch (rows) {
        case 1: return value_rows<C, 1>(weights, runs, num_runs, width, stride, sums);
        case 2: return value_rows<C, 2>(weights, runs, num_runs, width, stride, sums);
        case 3: return value_rows<C, 3>(weights, runs, num_runs, width, stride, sums);
        case 4: return value_rows<C, 4>(weights, runs, num_runs, width, stride, sums);
        case 5: return value_rows<C, 5>(weights, runs, num_runs, width, stride, sums);
        case 6: return value_rows<C, 6>(weights, runs, num_runs, width, stride, sums);
        default: break;
    }
    if constexpr (kTileRows > 6) {
        if (rows == 7) return value_rows<C, 7>(weights, runs, num_runs, width, stride, sums);
        if (rows == 8) return value_rows<C, 8>(weights, runs, num_runs, width, stride, sums);
    }
}

// ---- a tile ----

inline std::int64_t lesser(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t greater(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
inline std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) { return x < low ? low : x > high ? high : x; }
inline std::int64_t padded(std::int64_t count) { return (count + 15) / 16 * 16; }

inline constexpr std::int64_t kChunkRows = 4 * kTileRows;  // whose scores over a span stay in the caches at hand

inline std::int64_t chunk_rows(std::int64_t rows) { return rows < kChunkRows + 8 ? kChunkRows + 8 : kChunkRows; }

// Floats of a tile's work. Rows of sums are padded to whole registers.
struct Scratch {
    float *q, *scores, *sums, *tops, *totals, *all_sums, *all_tops, *all_totals, *k_scale, *v_scale, *keys, *values, *lanes;
    std::int64_t width;  // of a row of sums
};

inline std::int64_t lay_out(const AttentionStep& s, std::int64_t rows, float* base, Scratch& out) {
    float* at = base;
    const auto take = [&at](std::int64_t count) {
        float* p = at;
        at += padded(count);
        return p;
    };
    // The longest chunk of any tile: fewer rows never need more room, so what the largest tile of a step needs is enough for all.
    const std::int64_t chunk = lesser(rows, kChunkRows + 8);
    out.width = padded(s.value_dim);
    out.q = take(rows * s.head_dim);
    out.scores = take(chunk * kScoreStride);
    out.sums = take(chunk * out.width);
    out.tops = take(chunk);
    out.totals = take(chunk);
    out.all_sums = take(rows * out.width);
    out.all_tops = take(rows);
    out.all_totals = take(rows);
    out.k_scale = take(kSpan);
    out.v_scale = take(kSpan);
    out.keys = take(kSpan * s.head_dim);
    out.values = take(kSpan * out.width);
    out.lanes = take(kPanel * s.head_dim);
    return at - base;
}

inline std::int64_t scratch_size(const AttentionStep& s, std::int64_t rows) {
    Scratch unused;
    float none[1];
    return lay_out(s, rows, none, unused);
}

// Rows are worked on in blocks of nearly equal size, at most kTileRows each. Seven are five and two where they do not fit in one
// block: three rows have too few sums to hide the latency of their additions.
struct RowBlocks {
    std::int64_t count, least, more;  // the first `more` have least + 1 rows
    bool is_seven;

    explicit RowBlocks(std::int64_t rows) {
        count = (rows + kTileRows - 1) / kTileRows;
        least = rows / count;
        more = rows - least * count;
        is_seven = rows == 7 && count == 2;
    }
    int size(std::int64_t i) const {
        if (is_seven) return i == 0 ? 5 : 2;
        return static_cast<int>(least + (i < more ? 1 : 0));
    }
};

// Copy queries as [block][D][rows of the block].
template <class T>
inline void pack_queries(const AttentionArgs& a, const AttentionStep& s, const AttentionTile& t, float* out) {
    const std::int64_t heads = t.head_end - t.head_begin, rows = t.rows();
    const RowBlocks blocks(rows);
    std::int64_t row = 0;
    for (std::int64_t b = 0; b < blocks.count; ++b) {
        const int size = blocks.size(b);
        for (int r = 0; r < size; ++r, ++row) {
            const T* q = static_cast<const T*>(a.q) + (t.begin + row / heads) * a.q_stride + (t.head_begin + row % heads) * s.head_dim;
            for (std::int64_t d = 0; d < s.head_dim; d += Vec::width) {
                float lanes[Vec::width];
                Vec::store(lanes, load_some(q + d, s.head_dim - d));
                const std::int64_t count = lesser(Vec::width, s.head_dim - d);
                for (std::int64_t i = 0; i < count; ++i) out[(d + i) * size + r] = lanes[i];
            }
        }
        out += size * s.head_dim;
    }
}

inline float exp_one(float x) {
    float lanes[Vec::width];
    Vec::store(lanes, exp_falling(Vec::set1(x)));
    return lanes[0];
}

// What a row's scores change by with the distance of their keys (Press et al., 2022, arXiv:2108.12409): the slope, and the
// position of the span's first key minus the query's.
struct Bias {
    float slope, distance;
};

struct Counts {
    alignas(64) float at[kSpan];
    constexpr Counts() : at() {
        for (int i = 0; i < kSpan; ++i) at[i] = static_cast<float>(i);
    }
};
inline constexpr Counts kCounts;

// Turn a row's scores of keys [low, high) of a span into weights; give their maximum and sum. Registers begin at fixed keys of
// the span, and keys outside weigh nothing, so neither depends on what other rows of the tile see. Plain: scores are scaled and no
// more.
template <bool Plain>
inline void weigh_scores(float* scores, std::int64_t low, std::int64_t high, float scale, float softcap, Bias bias, const float* k_scale,
                         const float* v_scale, float& top, float& total) {
    constexpr std::int64_t W = Vec::width;
    const std::int64_t begin = low / W * W, end = (high + W - 1) / W * W;
    const Reg factor = Vec::set1(scale);
    const float nothing = -__builtin_inff();
    Reg highest = Vec::set1(nothing);
    const auto change = [&](std::int64_t j) {
        Reg v = Vec::mul(Vec::load(scores + j), factor);
        if constexpr (!Plain) {
            if (k_scale) v = Vec::mul(v, Vec::load(k_scale + j));
            if (softcap > 0) v = cap_scores(v, softcap);
            if (bias.slope != 0) v = Vec::fma(Vec::set1(bias.slope), Vec::add(Vec::load(kCounts.at + j), Vec::set1(bias.distance)), v);
        }
        Vec::store(scores + j, v);
        return v;
    };
    const auto change_some = [&](std::int64_t j) {
        change(j);
        for (std::int64_t i = j; i < low; ++i) scores[i] = nothing;
        for (std::int64_t i = greater(high, j); i < j + W; ++i) scores[i] = nothing;
        highest = Vec::max(highest, Vec::load(scores + j));
    };
    std::int64_t j = begin;
    if (j < low) {
        change_some(j);
        j += W;
    }
    for (; j + W <= high; j += W) highest = Vec::max(highest, change(j));
    if (j < end) change_some(j);
    top = Vec::highest(highest);
    const Reg most = Vec::set1(top);
    Reg sum = Vec::zero();
    for (j = begin; j < end; j += W) {
        Reg weight = exp_falling(Vec::sub(Vec::load(scores + j), most));
        sum = Vec::add(sum, weight);
        if constexpr (!Plain) {
            if (v_scale) weight = Vec::mul(weight, Vec::load(v_scale + j));
        }
        Vec::store(scores + j, weight);
    }
    total = Vec::sum(sum);
}

inline void weigh_row(float* scores, std::int64_t low, std::int64_t high, float scale, float softcap, Bias bias, const float* k_scale,
                      const float* v_scale, float& top, float& total) {
    if (k_scale || v_scale || softcap > 0 || bias.slope != 0) {
        weigh_scores<false>(scores, low, high, scale, softcap, bias, k_scale, v_scale, top, total);
    } else {
        weigh_scores<true>(scores, low, high, scale, softcap, bias, k_scale, v_scale, top, total);
    }
}

// Merge a span's sums into those of the spans before it. total 0: nothing there yet, or nothing in the span.
inline void merge_row(float* sums, float& top, float& total, const float* new_sums, float new_top, float new_total, std::int64_t width) {
    if (new_total == 0) return;
    if (total == 0) {
        top = new_top;
        total = new_total;
        for (std::int64_t d = 0; d < width; d += Vec::width) store_some(sums + d, load_some(new_sums + d, width - d), width - d);
        return;
    }
    const float highest = new_top > top ? new_top : top;
    const float fade = exp_one(top - highest), new_fade = exp_one(new_top - highest);
    const Reg x = Vec::set1(fade), y = Vec::set1(new_fade);
    top = highest;
    total = total * fade + new_total * new_fade;
    for (std::int64_t d = 0; d < width; d += Vec::width) {
        const Reg old = Vec::mul(load_some(sums + d, width - d), x);
        store_some(sums + d, Vec::fma(load_some(new_sums + d, width - d), y, old), width - d);
    }
}

// Divide sums by totals, sinks counted in, and write them out. `factor`: what the cache's floats lack.
template <class T>
inline void write_rows(const AttentionArgs& a, const AttentionStep& s, const AttentionTile& t, const Scratch& m, float factor) {
    const std::int64_t heads = t.head_end - t.head_begin;
    for (std::int64_t r = 0; r < t.rows(); ++r) {
        const std::int64_t head = t.head_begin + r % heads;
        T* out = static_cast<T*>(a.out) + ((t.begin + r / heads) * s.q_heads + head) * s.value_dim;
        float total = m.all_totals[r], fade = factor;
        if (a.sinks) {
            const float top = m.all_tops[r], sink = a.sinks[head], highest = sink > top ? sink : top;
            const float scaled = exp_one(top - highest);
            total = total * scaled + exp_one(sink - highest);
            fade = factor * scaled;
        }
        const float* sums = m.all_sums + r * m.width;
        const Reg divisor = Vec::set1(total), multiplier = Vec::set1(fade);
        for (std::int64_t d = 0; d < s.value_dim; d += Vec::width) {
            store_some(out + d, Vec::div(Vec::mul(Vec::load(sums + d), multiplier), divisor), s.value_dim - d);
        }
    }
}

inline void write_tile(const AttentionArgs& a, const AttentionStep& s, const AttentionTile& t, const Scratch& m) {
    const float factor = a.cache_type == CacheType::fp8_e4m3 ? CodecFP8::factor : 1.0f;
    a.type == DType::float32 ? write_rows<float>(a, s, t, m, factor) : write_rows<bf16>(a, s, t, m, factor);
}

template <class C>
inline Reg load_elements(const typename C::Element* from, std::int64_t count) {
    if (count >= Vec::width) return C::load(from);
    typename C::Element some[Vec::width] = {};
    __builtin_memcpy(some, from, static_cast<std::size_t>(count) * sizeof some[0]);
    return C::load(some);
}

// Where a tile's keys and values lie.
template <class C>
struct Place {
    using E = typename C::Element;
    static constexpr std::int64_t unit = C::lanes * static_cast<std::int64_t>(sizeof(E));  // bytes of a key that lie together
    const AttentionArgs& a;
    const AttentionStep& s;
    const std::int32_t* table;
    std::int64_t head, block_size, value_stride;
    bool whole;  // a register of keys never leaves a block
    int shift;  // block_size is a power of two: this one; otherwise -1

    Place(const AttentionArgs& args, const AttentionStep& step, const AttentionTile& t)
        : a(args), s(step), table(step.block_table + t.request * step.table_width), head(t.head_begin / (step.q_heads / step.k_heads)),
          block_size(step.block_size), value_stride(args.one_cache ? step.head_dim : step.value_dim),
          whole(step.block_size % Vec::width == 0) {
        shift = (block_size & (block_size - 1)) == 0 ? __builtin_ctzll(static_cast<unsigned long long>(block_size)) : -1;
    }
    std::int64_t index(std::int64_t position) const {
        if (shift >= 0) return position >> shift;
        return static_cast<std::uint32_t>(position) / static_cast<std::uint32_t>(block_size);
    }
    const char* key(std::int64_t position) const {
        const std::int64_t i = index(position), offset = position - i * block_size;
        return static_cast<const char*>(a.k_cache.data) + table[i] * a.k_cache.block_bytes +
               (head * s.head_dim * block_size + offset * C::lanes) * static_cast<std::int64_t>(sizeof(E));
    }
    const E* value(std::int64_t position) const {
        const std::int64_t i = index(position), offset = position - i * block_size;
        return reinterpret_cast<const E*>(static_cast<const char*>(a.v_cache.data) + table[i] * a.v_cache.block_bytes) +
               (head * block_size + offset) * value_stride;
    }
    // Keys of the panel that begins at position p; those outside [low, high) may be anything.
    void panel(std::int64_t p, std::int64_t low, std::int64_t high, char* lanes, PanelKeys& out) const {
        if (whole) {
            out.row = block_size * unit;
            out.stride = out.row * (C::step / C::lanes);
            for (int v = 0; v < kPanelVectors; ++v) {
                const std::int64_t at = p + v * Vec::width;
                out.at[v] = key(clamp(at, low / Vec::width * Vec::width, (high - 1) / Vec::width * Vec::width));
            }
            return;
        }
        const std::int64_t count = s.head_dim / C::lanes;
        __builtin_memset(lanes, 0, static_cast<std::size_t>(count * kPanel * unit));
        for (std::int64_t j = greater(low - p, 0); j < lesser(high - p, kPanel); ++j) {
            const char* from = key(p + j);
            for (std::int64_t i = 0; i < count; ++i) __builtin_memcpy(lanes + (i * kPanel + j) * unit, from + i * block_size * unit, unit);
        }
        out.row = kPanel * unit;
        out.stride = out.row * (C::step / C::lanes);
        for (int v = 0; v < kPanelVectors; ++v) out.at[v] = lanes + v * Vec::width * unit;
    }
    // Where keys lie as values do: those of the panel that begins at position p, as floats, [D][kPanel]; outside [low, high), any.
    void turn(std::int64_t p, std::int64_t low, std::int64_t high, float* out) const {
        const E* from[kPanel];
        for (std::int64_t j = 0; j < kPanel; ++j) from[j] = value(clamp(p + j, low, high - 1));
        for (std::int64_t d = 0; d < s.head_dim; d += Vec::width) {
            const std::int64_t count = lesser(Vec::width, s.head_dim - d);
            for (std::int64_t j = 0; j < kPanel; j += Vec::width) {
                Reg square[Vec::width];
#pragma GCC unroll 16
                for (int i = 0; i < Vec::width; ++i) square[i] = load_elements<C>(from[j + i] + d, count);
                Vec::transpose(square);
                if (count == Vec::width) {
#pragma GCC unroll 16
                    for (int i = 0; i < Vec::width; ++i) Vec::store(out + (d + i) * kPanel + j, square[i]);
                } else {
                    for (std::int64_t i = 0; i < count; ++i) Vec::store(out + (d + i) * kPanel + j, square[i]);
                }
            }
        }
    }
    // Values of keys [low, high), at most kValueKeys of them, in order. Meanwhile keys a span later are asked for, up to `end`, by
    // each of `askers` the share of its own.
    int runs(std::int64_t low, std::int64_t high, std::int64_t end, std::int64_t asker, std::int64_t askers, ValueRun<E>* out) const {
        int count = 0;
        while (low < high) {
            const std::int64_t offset = low - index(low) * block_size, here = lesser(block_size - offset, high - low);
            const std::int64_t later = low - offset + kSpan;  // its block, as far into it as this run is into this one
            const bool known = kSpan % block_size == 0 && later + block_size <= end;
            constexpr std::int64_t size = sizeof(E);
            const std::int64_t each = askers > 1 ? here * size / kAskers : here * size, first = offset * size + asker * each;
            out[count++] = {value(low), here, known ? key(later) + first * s.head_dim : nullptr, each};
            low += here;
        }
        return count;
    }
    void scales(const ScaleView& scale, std::int64_t base, std::int64_t low, std::int64_t high, float* out) const {
        for (std::int64_t p = base + low / Vec::width * Vec::width; p < base + low; ++p) out[p - base] = 0;
        for (std::int64_t p = base + low; p < base + high; ++p) {
            const std::int64_t i = index(p);
            out[p - base] = scale.data[table[i] * scale.block_stride + head * block_size + p - i * block_size];
        }
        for (std::int64_t j = high; j < (high + Vec::width - 1) / Vec::width * Vec::width; ++j) out[j] = 0;
    }
};

// Keys of a panel as floats: [D][kPanel].
template <class C>
inline void convert_panel(const PanelKeys& keys, std::int64_t steps, float* out) {
    for (std::int64_t i = 0; i < steps; ++i) {
        for (int v = 0; v < kPanelVectors; ++v) {
            float* at = out + v * Vec::width;
            const char* from = keys.at[v] + i * keys.stride;
            Reg k[C::step];  // before any store: for all that the compiler knows, one might change the keys
            k[0] = C::template key<0>(from, keys.row);
            if constexpr (C::step >= 2) k[1] = C::template key<1>(from, keys.row);
            if constexpr (C::step == 4) {
                k[2] = C::template key<2>(from, keys.row);
                k[3] = C::template key<3>(from, keys.row);
            }
            for (int h = 0; h < C::step; ++h) Vec::store(at + h * kPanel, k[h]);
        }
        out += C::step * kPanel;
    }
}

template <class C>
inline void convert_value(const typename C::Element* from, std::int64_t value_dim, std::int64_t width, float* out) {
    for (std::int64_t d = 0; d < width; d += Vec::width) {
        Vec::store(out + d, load_elements<C>(from + d, greater(value_dim - d, 0)));
    }
}

// The keys [low, high) of a span, beginning at position `base`, that the rows of a tile see.
template <class C>
struct Span {
    const Place<C>& place;
    std::int64_t base, low, high, end;  // end: of all keys that the tile sees
    bool convert_keys, convert_values;
};

template <class C>
inline void load_span(const Span<C>& span, const Scratch& m, const AttentionStep& s) {
    if (span.place.a.one_cache) {
        for (std::int64_t p = span.low / kPanel * kPanel; p < span.high; p += kPanel) {
            span.place.turn(span.base + p, span.base + span.low, span.base + span.high, m.keys + p * s.head_dim);
        }
    } else if (span.convert_keys) {
        for (std::int64_t p = span.low / kPanel * kPanel; p < span.high; p += kPanel) {
            PanelKeys keys;
            span.place.panel(span.base + p, span.base + span.low, span.base + span.high, reinterpret_cast<char*>(m.lanes), keys);
            convert_panel<C>(keys, s.head_dim / C::step, m.keys + p * s.head_dim);
        }
    }
    if (span.convert_values) {
        for (std::int64_t p = span.low; p < span.high; ++p) {
            convert_value<C>(span.place.value(span.base + p), s.value_dim, m.width, m.values + p * m.width);
        }
    }
}

// What rows of a tile see of a span.
struct Sight {
    const AttentionStep& s;
    std::int64_t first, heads, base, prompt_len;  // first: position of the tile's first token
    bool before;  // only keys of the prompt that stays in sight, otherwise only those behind it

    std::int64_t position(std::int64_t row) const { return first + static_cast<std::uint32_t>(row) / static_cast<std::uint32_t>(heads); }
    std::int64_t low(std::int64_t row) const { return before ? 0 : clamp(s.sight_begin(position(row), prompt_len) - base, 0, kSpan); }
    std::int64_t high(std::int64_t row) const {
        const std::int64_t end = position(row) + 1;
        return clamp((before ? lesser(end, prompt_len) : end) - base, 0, kSpan);
    }
};

template <class C>
inline void score_chunk(const Span<C>& span, const Sight& sight, const AttentionStep& s, const Scratch& m, const RowBlocks& blocks,
                        std::int64_t block_begin, std::int64_t block_end, std::int64_t row_begin, std::int64_t row_end) {
    const std::int64_t low = sight.low(row_begin), high = sight.high(row_end - 1);
    const std::int64_t panel_begin = low / kPanel * kPanel;
    const auto find = [&](std::int64_t p, PanelKeys& keys) {
        if (span.convert_keys) {
            keys.row = keys.stride = kPanel * 4;
            for (int v = 0; v < kPanelVectors; ++v) keys.at[v] = reinterpret_cast<const char*>(m.keys + p * s.head_dim + v * Vec::width);
        } else {
            span.place.panel(span.base + p, span.base + span.low, span.base + span.high, reinterpret_cast<char*>(m.lanes), keys);
        }
    };
    // Meanwhile ask for the next panel of keys and this one's values; where they are floats already, for the next span's.
    const bool whole = span.place.whole;
    const std::int64_t askers = lesser(block_end - block_begin, kAskers), steps = span.convert_keys ? s.head_dim : s.head_dim / C::step;
    const auto look_ahead = [&](std::int64_t p, std::int64_t asker, PanelKeys& keys) {
        const std::int64_t ahead_stride =
            span.convert_keys ? kLine / 4 * static_cast<std::int64_t>(sizeof(typename C::Element)) : keys.stride;
        const std::int64_t all = span.convert_keys ? ahead_stride : kLine, after_stride = askers > 1 ? all / kAskers : all;
        const std::int64_t distance = span.convert_keys ? kSpan : kPanel, last = span.base + (span.convert_keys ? kSpan * 2 : span.high);
        const std::int64_t end = lesser(span.end, last);
        constexpr std::int64_t group = kLine / 4;  // keys in a line
        for (int v = 0; v < kPanelVectors; ++v) {
            const std::int64_t at = span.base + p + v * Vec::width / group * group, next = at + distance;
            const bool known = next < end;
            keys.ahead[v] = known && asker == 0 ? span.place.key(next) : keys.at[v];
            const std::int64_t value = span.convert_keys ? next : at;
            const bool seen = span.convert_keys ? known : at >= span.base + span.low && at < span.base + span.high;
            keys.after[v] = seen ? reinterpret_cast<const char*>(span.place.value(value)) + asker * steps * after_stride : keys.at[v];
        }
        keys.ahead_stride = ahead_stride;
        keys.after_stride = after_stride;
    };
    PanelKeys keys{};
    for (std::int64_t p = panel_begin; p < high; p += kPanel) {
        find(p, keys);
        std::int64_t asker = whole && row_begin == 0 ? 0 : askers;
        std::int64_t row = row_begin;
        const float* q = m.q + row_begin * s.head_dim;
        for (std::int64_t b = block_begin; b < block_end; ++b) {
            const int size = blocks.size(b);
            if (sight.low(row) < p + kPanel && sight.high(row + size - 1) > p) {
                float* out = m.scores + (row - row_begin) * kScoreStride + p;
                const bool ahead = asker < askers;
                if (ahead) look_ahead(p, asker++, keys);
                if (span.convert_keys) score_panel<CodecF32>(size, q, keys, ahead, steps, out);
                else score_panel<C>(size, q, keys, ahead, steps, out);
            }
            row += size;
            q += size * s.head_dim;
        }
    }
}

template <class C>
inline void add_values(const Span<C>& span, const Scratch& m, std::int64_t row, int rows, std::int64_t low, std::int64_t high,
                       std::int64_t asker, std::int64_t askers) {
    if (low >= high) return;
    const float* weights = m.scores + row * kScoreStride + low;
    float* sums = m.sums + row * m.width;
    if (span.convert_values) {
        const ValueRun<float> run{m.values + low * m.width, high - low, nullptr, 0};
        return value_panel<CodecF32>(rows, weights, &run, 1, m.width, m.width, sums);
    }
    ValueRun<typename C::Element> runs[kValueKeys];
    const int count = span.place.runs(span.base + low, span.base + high, asker < askers ? span.end : 0, asker, askers, runs);
    value_panel<C>(rows, weights, runs, count, m.width, span.place.value_stride, sums);
}

template <class C>
inline void value_chunk(const Span<C>& span, const Sight& sight, const Scratch& m, const RowBlocks& blocks, std::int64_t block_begin,
                        std::int64_t block_end, std::int64_t row_begin, std::int64_t row_end) {
    __builtin_memset(m.sums, 0, static_cast<std::size_t>((row_end - row_begin) * m.width) * sizeof(float));
    const std::int64_t askers = lesser(block_end - block_begin, kAskers);
    const std::int64_t low = sight.low(row_begin), high = sight.high(row_end - 1);
    for (std::int64_t part = low / kValueKeys * kValueKeys; part < high; part += kValueKeys) {
        const auto within = [&](std::int64_t j) { return clamp(j, part, part + kValueKeys); };
        std::int64_t row = row_begin;
        for (std::int64_t b = block_begin; b < block_end; ++b) {
            const int size = blocks.size(b);
            // Keys that all rows of the block see are added together; what only some see, row by row, for a key that a row does
            // not see must not even be multiplied by zero. Each row's keys stay in order.
            const std::int64_t begin = within(sight.low(row + size - 1)), end = within(sight.high(row));
            const std::int64_t at = row - row_begin;
            const auto add = [&](std::int64_t first, int rows, std::int64_t from, std::int64_t to) {
                add_values(span, m, first, rows, from, to, row_begin + b - block_begin, askers);
            };
            if (begin < end) {
                if (sight.low(row) < begin) {
                    for (int r = 0; r < size; ++r) add(at + r, 1, within(sight.low(row + r)), begin);
                }
                add(at, size, begin, end);
                if (sight.high(row + size - 1) > end) {
                    for (int r = 0; r < size; ++r) add(at + r, 1, end, within(sight.high(row + r)));
                }
            } else {
                for (int r = 0; r < size; ++r) add(at + r, 1, within(sight.low(row + r)), within(sight.high(row + r)));
            }
            row += size;
        }
    }
}

template <class C>
inline void attend_spans(const AttentionArgs& a, const AttentionStep& s, const AttentionTile& t, float* partial, const Scratch& m) {
    const Place<C> place(a, s, t);
    const std::int64_t rows = t.rows(), heads = t.head_end - t.head_begin;
    const std::int64_t first = s.seq_lens[t.request] - s.query_start_loc[t.request + 1] + t.begin;
    const std::int64_t prompt_len = s.prompt_len(t.request);
    const RowBlocks blocks(rows);
    const bool many = rows >= C::convert_rows, is_int8 = a.cache_type == CacheType::int8;
    const std::int64_t most = chunk_rows(rows);
    for (std::int64_t i = t.span_begin; i < t.span_end; ++i) {
        const std::int64_t base = t.at(i) * kSpan, end = first + t.end - t.begin;
        const Sight sight{s, first, heads, base, prompt_len, t.in_prompt(i)};
        const Span<C> span{place, base, sight.low(0), sight.high(rows - 1), sight.before ? lesser(end, prompt_len) : end,
                           a.one_cache || (many && (C::step > 1 || !place.whole)),
                           (many && C::step > 1) || s.value_dim % Vec::width != 0 || m.width != s.value_dim};
        load_span(span, m, s);
        if (is_int8) {
            place.scales(a.k_scale, span.base, span.low, span.high, m.k_scale);
            place.scales(a.v_scale, span.base, span.low, span.high, m.v_scale);
        }
        std::int64_t row = 0;
        for (std::int64_t b = 0; b < blocks.count;) {
            const std::int64_t row_begin = row, block_begin = b;
            while (b < blocks.count && row + blocks.size(b) - row_begin <= most) row += blocks.size(b++);
            score_chunk(span, sight, s, m, blocks, block_begin, b, row_begin, row);
            for (std::int64_t r = row_begin; r < row; ++r) {
                const std::int64_t low = sight.low(r), high = sight.high(r), at = r - row_begin;
                m.tops[at] = -__builtin_inff();
                m.totals[at] = 0;
                if (low >= high) continue;
                float* scores = m.scores + at * kScoreStride;
                const float slope = a.slopes ? a.slopes[t.head_begin + r % heads] : 0.0f;
                const Bias bias{slope, static_cast<float>(span.base - sight.position(r))};
                weigh_row(scores, low, high, a.scale * C::factor, a.softcap, bias, is_int8 ? m.k_scale : nullptr,
                          is_int8 ? m.v_scale : nullptr, m.tops[at], m.totals[at]);
            }
            value_chunk(span, sight, m, blocks, block_begin, b, row_begin, row);
            for (std::int64_t r = row_begin; r < row; ++r) {
                const std::int64_t at = r - row_begin;
                const float* sums = m.sums + at * m.width;
                if (!partial) {
                    merge_row(m.all_sums + r * m.width, m.all_tops[r], m.all_totals[r], sums, m.tops[at], m.totals[at], m.width);
                    continue;
                }
                float* out = partial + (i - t.span_begin) * partial_floats(rows, s.value_dim);
                copy_converted(sums, out + r * s.value_dim, s.value_dim);
                out[rows * s.value_dim + r] = m.tops[at];
                out[rows * (s.value_dim + 1) + r] = m.totals[at];
            }
        }
    }
}

inline void clear_rows(const Scratch& m, std::int64_t rows) {
    for (std::int64_t r = 0; r < rows; ++r) {
        m.all_tops[r] = -__builtin_inff();
        m.all_totals[r] = 0;
    }
}

inline void attend(const AttentionArgs& a, const AttentionStep& s, const AttentionTile& t, float* partial, float* scratch) {
    Scratch m;
    lay_out(s, t.rows(), scratch, m);
    a.type == DType::float32 ? pack_queries<float>(a, s, t, m.q) : pack_queries<bf16>(a, s, t, m.q);
    clear_rows(m, t.rows());
    switch (a.cache_type) {
        case CacheType::float32: attend_spans<CodecF32>(a, s, t, partial, m); break;
        case CacheType::bfloat16: attend_spans<CodecBF16>(a, s, t, partial, m); break;
        case CacheType::fp8_e4m3: attend_spans<CodecFP8>(a, s, t, partial, m); break;
        case CacheType::int8: attend_spans<CodecI8>(a, s, t, partial, m); break;
        case CacheType::float16: attend_spans<CodecF16>(a, s, t, partial, m); break;
    }
    if (!partial) write_tile(a, s, t, m);
}

inline void merge(const AttentionArgs& a, const AttentionStep& s, const AttentionTile& t, const float* partial, float* scratch) {
    Scratch m;
    const std::int64_t rows = t.rows(), each = partial_floats(rows, s.value_dim);
    lay_out(s, rows, scratch, m);
    clear_rows(m, rows);
    for (std::int64_t i = 0; i < t.span_end - t.span_begin; ++i) {
        const float* part = partial + i * each;
        for (std::int64_t r = 0; r < rows; ++r) {
            merge_row(m.all_sums + r * m.width, m.all_tops[r], m.all_totals[r], part + r * s.value_dim, part[rows * s.value_dim + r],
                      part[rows * (s.value_dim + 1) + r], s.value_dim);
        }
    }
    write_tile(a, s, t, m);
}

}  // namespace canter::CANTER_ISA

namespace canter {

const AttentionKernels CANTER_TABLE = {CANTER_ISA::write_kv, CANTER_ISA::scratch_size, CANTER_ISA::attend, CANTER_ISA::merge};

}  // namespace canter
