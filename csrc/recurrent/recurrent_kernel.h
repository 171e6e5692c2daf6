// Included once per instruction set. A task is a tile of two vectors of one request's state. Rows of a text pass a tile that is
// kept close; a request that brings a single row has its state read and written once, in the order in which it lies in memory,
// several tiles together. Both do the same to every element, in the same order.

namespace canter::CANTER_ISA {

inline constexpr std::int64_t kTile = 2 * Vec::width;
inline constexpr std::int64_t kChunk = 16;  // rows that pass a piece of state while it is in registers

struct Pair {
    Reg lo, hi;
};

// Up to kTile lanes; those behind `count` are zero, or are not stored.
template <class T>
inline Pair load_tile(const T* p, std::int64_t count) {
    return {load_some(p, count), count > Vec::width ? load_some(p + Vec::width, count - Vec::width) : Vec::zero()};
}

template <class T>
inline void store_tile(T* p, Pair v, std::int64_t count) {
    store_some(p, v.lo, count);
    if (count > Vec::width) store_some(p + Vec::width, v.hi, count - Vec::width);
}

inline Pair load_whole(const float* p) { return {Vec::load(p), Vec::load(p + Vec::width)}; }

inline void store_whole(float* p, Pair v) {
    Vec::store(p, v.lo);
    Vec::store(p + Vec::width, v.hi);
}

// a * b + c
inline Pair fma(Pair a, Pair b, Pair c) { return {Vec::fma(a.lo, b.lo, c.lo), Vec::fma(a.hi, b.hi, c.hi)}; }
inline Pair fma(Reg a, Pair b, Pair c) { return {Vec::fma(a, b.lo, c.lo), Vec::fma(a, b.hi, c.hi)}; }
inline Pair mul(Pair a, Pair b) { return {Vec::mul(a.lo, b.lo), Vec::mul(a.hi, b.hi)}; }
inline Pair mul(Reg a, Pair b) { return {Vec::mul(a, b.lo), Vec::mul(a, b.hi)}; }
inline Pair add(Pair a, Pair b) { return {Vec::add(a.lo, b.lo), Vec::add(a.hi, b.hi)}; }
inline Pair sub(Pair a, Pair b) { return {Vec::sub(a.lo, b.lo), Vec::sub(a.hi, b.hi)}; }
inline Pair zero_pair() { return {Vec::zero(), Vec::zero()}; }

// One element of either type.
inline float element(const float* p) { return *p; }
inline float element(const bf16* p) {
    const std::uint32_t bits = static_cast<std::uint32_t>(p->bits) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
inline float element(const void* p, DType type, std::int64_t i) {
    return type == DType::float32 ? element(static_cast<const float*>(p) + i) : element(static_cast<const bf16*>(p) + i);
}

inline float first_lane(Reg v) {
    float lanes[Vec::width];
    Vec::store(lanes, v);
    return lanes[0];
}

// `depth` rows of a state, `stride` floats apart, to a dense tile and back. No slot: the state of what begins.
inline void read_tile(const float* slot, std::int64_t stride, std::int64_t depth, std::int64_t count, float* tile) {
    for (std::int64_t n = 0; n < depth; ++n) store_whole(tile + n * kTile, slot ? load_tile(slot + n * stride, count) : zero_pair());
}

inline void write_tile(const float* tile, std::int64_t stride, std::int64_t depth, std::int64_t count, float* slot) {
    for (std::int64_t n = 0; n < depth; ++n) store_tile(slot + n * stride, load_whole(tile + n * kTile), count);
}

// Walk the rows of a request, segment by segment: run(begin, end), and keep(slot) behind each segment that is to be kept.
template <class Run, class Keep>
inline void walk(const RecurrentPlan& p, std::int64_t request, const Run& run, const Keep& keep) {
    const std::int64_t first = p.segment_start[request], last = p.segment_start[request + 1];
    std::int64_t row = first == 0 ? 0 : p.ends[first - 1];
    for (std::int64_t s = first; s < last; ++s) {
        if (p.ends[s] > row) run(row, static_cast<std::int64_t>(p.ends[s]));
        row = p.ends[s];
        if (p.write[s] >= 0) keep(static_cast<std::int64_t>(p.write[s]));
    }
}

inline constexpr std::int64_t kColumns = 512;  // of a state that a single row works on together

// The request's row, if it has one row and one segment, otherwise -1.
inline std::int64_t single_row(const RecurrentPlan& p, std::int64_t request) {
    const std::int64_t segment = p.segment_start[request];
    if (p.segment_start[request + 1] != segment + 1) return -1;
    const std::int64_t row = segment == 0 ? 0 : p.ends[segment - 1];
    return p.ends[segment] == row + 1 ? row : -1;
}

// Columns [begin, end) of one head's state, which the only row of a request reads and writes. No `from`: the state of what begins;
// no `to`: it is not kept. `more`: the next head's state is next.
struct Single {
    std::int64_t row, begin, end;
    const float* from;
    float* to;
    bool more;
};

// Walk tasks [begin, end): tile(request, head, column), and one(head, single) for requests of one row.
template <class Tile, class One>
inline void for_tasks(const RecurrentPlan& p, std::int64_t heads, std::int64_t depth, std::int64_t width, float* state, std::int64_t begin,
                      std::int64_t end, const Tile& tile, const One& one) {
    const std::int64_t tiles = (width + kTile - 1) / kTile, each = depth * width;
    for (std::int64_t task = begin; task < end;) {
        const std::int64_t request = task / (heads * tiles), head = task / tiles % heads, first = task % tiles;
        const std::int64_t row = single_row(p, request);
        if (row < 0) {
            tile(request, head, first * kTile);
            ++task;
            continue;
        }
        const std::int64_t last = end - task < tiles - first ? first + end - task : tiles;
        const std::int64_t read = p.read[request], write = p.write[p.segment_start[request]];
        const auto at = [&](std::int64_t slot) { return state + (slot * heads + head) * each; };
        task += last - first;
        const bool more = head + 1 < heads && task < end;
        for (std::int64_t column = first * kTile; column < last * kTile && column < width; column += kColumns) {
            std::int64_t stop = last * kTile < width ? last * kTile : width;
            if (stop - column > kColumns) stop = column + kColumns;
            one(head, Single{row, column, stop, read < 0 ? nullptr : at(read), write < 0 ? nullptr : at(write), more});
        }
    }
}

// each(j, count) for the vectors of columns [begin, end): `count` lanes of each are columns.
template <class F>
inline void for_vectors(std::int64_t begin, std::int64_t end, const F& each) {
    std::int64_t j = begin;
    for (; j + Vec::width <= end; j += Vec::width) each(j, static_cast<std::int64_t>(Vec::width));
    if (j < end) each(j, end - j);
}

inline Reg load_state(const float* p, std::int64_t count) { return p ? load_some(p, count) : Vec::zero(); }

template <class T, int Taps>
inline void conv_lanes(const ConvArgs& a, std::int64_t request, std::int64_t channel) {
    const std::int64_t rest = a.channels - channel, size = (Taps - 1) * a.channels;
    T* states = static_cast<T*>(a.state) + channel;
    Reg taps[Taps], past[Taps];
    for (int j = 0; j < Taps; ++j) taps[j] = load_some(a.weight + j * a.channels + channel, rest);
    const std::int32_t read = a.plan.read[request];
    for (int j = 0; j < Taps - 1; ++j) past[j] = read < 0 ? Vec::zero() : load_some(states + read * size + j * a.channels, rest);
    const Reg bias = a.bias ? load_some(a.bias + channel, rest) : Vec::zero();
    const auto run = [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            Reg now = load_some(static_cast<const T*>(a.x) + t * a.x_stride + channel, rest);
            if (a.gate_in) {
                now = round_to<T>(Vec::mul(now, load_some(static_cast<const T*>(a.gate_in) + t * a.gate_in_stride + channel, rest)));
            }
            past[Taps - 1] = now;
            Reg total = Vec::mul(past[0], taps[0]);
#pragma GCC unroll 8
            for (int j = 1; j < Taps; ++j) total = Vec::fma(past[j], taps[j], total);
            if (a.bias) total = Vec::add(total, bias);
            if (a.silu) total = gate(total, total);
            if (a.gate_out) {
                total = Vec::mul(total, load_some(static_cast<const T*>(a.gate_out) + t * a.gate_out_stride + channel, rest));
            }
            store_some(static_cast<T*>(a.out) + t * a.channels + channel, total, rest);
#pragma GCC unroll 8
            for (int j = 0; j + 1 < Taps; ++j) past[j] = past[j + 1];
        }
    };
    walk(a.plan, request, run, [&](std::int64_t slot) {
        for (int j = 0; j < Taps - 1; ++j) store_some(states + slot * size + j * a.channels, past[j], rest);
    });
}

template <class T>
inline void conv_tile(const ConvArgs& a, std::int64_t request, std::int64_t channel) {
    switch (a.taps) {
        case 2: return conv_lanes<T, 2>(a, request, channel);
        case 3: return conv_lanes<T, 3>(a, request, channel);
        case 4: return conv_lanes<T, 4>(a, request, channel);
        case 5: return conv_lanes<T, 5>(a, request, channel);
        case 6: return conv_lanes<T, 6>(a, request, channel);
        case 7: return conv_lanes<T, 7>(a, request, channel);
        default: return conv_lanes<T, 8>(a, request, channel);
    }
}

inline void causal_conv(const ConvArgs& a, std::int64_t begin, std::int64_t end) {
    const std::int64_t tiles = (a.channels + kTile - 1) / kTile;
    for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t request = task / tiles, channel = task % tiles * kTile;
        for (std::int64_t c = channel; c < a.channels && c < channel + kTile; c += Vec::width) {
            a.type == DType::float32 ? conv_tile<float>(a, request, c) : conv_tile<bf16>(a, request, c);
        }
    }
}

// Rows of b or c as floats: where they lie, or converted.
inline void float_rows(const float* source, std::int64_t stride, std::int64_t count, std::int64_t, float*, const float** rows) {
    for (std::int64_t t = 0; t < count; ++t) rows[t] = source + t * stride;
}
inline void float_rows(const bf16* source, std::int64_t stride, std::int64_t count, std::int64_t depth, float* space, const float** rows) {
    for (std::int64_t t = 0; t < count; ++t) {
        copy_converted(source + t * stride, space + t * depth, depth);
        rows[t] = space + t * depth;
    }
}

// `Rows` rows of the state in registers while `count` rows of the input pass: h = decay h + b u, y += c h.
template <int Rows>
inline void ssd_rows(float* tile, std::int64_t n, std::int64_t count, const float* decay, const float* u, float* y,
                     const float* const* b, const float* const* c) {
    Pair h[Rows];
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) h[i] = load_whole(tile + (n + i) * kTile);
    for (std::int64_t t = 0; t < count; ++t) {
        const Reg stays = Vec::set1(decay[t]);
        const Pair in = load_whole(u + t * kTile);
        Pair sum = load_whole(y + t * kTile);
#pragma GCC unroll 4
        for (int i = 0; i < Rows; ++i) {
            h[i] = fma(Vec::set1(b[t][n + i]), in, mul(stays, h[i]));
            sum = fma(Vec::set1(c[t][n + i]), h[i], sum);
        }
        store_whole(y + t * kTile, sum);
    }
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) store_whole(tile + (n + i) * kTile, h[i]);
}

// What a row's dt comes to, for up to kChunk rows: the width of its step, and how much of the state stays.
inline void ssd_steps(const SsdArgs& a, std::int64_t head, std::int64_t row, std::int64_t count, float* widths, float* decay) {
    float raw[kChunk] = {};
    const float bias = a.dt_bias ? a.dt_bias[head] : 0.0f;
    for (std::int64_t t = 0; t < count; ++t) raw[t] = a.dt ? element(a.dt, a.dt_type, (row + t) * a.dt_stride + head) + bias : 1.0f;
    for (std::int64_t t = 0; t < kChunk; t += Vec::width) {
        Reg width = Vec::load(raw + t);
        if (a.dt) width = Vec::min(Vec::max(softplus(width), Vec::set1(a.dt_min)), Vec::set1(a.dt_max));
        Vec::store(widths + t, width);
        Vec::store(decay + t, exp(Vec::mul(width, Vec::set1(a.a[head]))));
    }
}

template <class T>
inline void ssd_tile(const SsdArgs& a, std::int64_t request, std::int64_t head, std::int64_t column) {
    const std::int64_t count = a.width - column < kTile ? a.width - column : kTile;
    const std::int64_t group = head / (a.heads / a.groups), size = a.heads * a.depth * a.width;
    float* states = a.state + head * a.depth * a.width + column;
    alignas(64) float tile[kMaxStateRows * kTile], space[sizeof(T) == 4 ? 1 : 2 * kChunk * kMaxStateRows];
    alignas(64) float u[kChunk * kTile], y[kChunk * kTile], widths[kChunk], decay[kChunk];
    const float *b[kChunk], *c[kChunk];
    const std::int32_t read = a.plan.read[request];
    read_tile(read < 0 ? nullptr : states + read * size, a.width, a.depth, count, tile);
    const Reg skip = a.d ? Vec::set1(a.d[head]) : Vec::zero();
    const auto run = [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; row += kChunk) {
            const std::int64_t rows = end - row < kChunk ? end - row : kChunk;
            const auto x_at = [&](std::int64_t t) { return static_cast<const T*>(a.x) + (row + t) * a.x_stride + head * a.width + column; };
            ssd_steps(a, head, row, rows, widths, decay);
            for (std::int64_t t = 0; t < rows; ++t) {
                store_whole(u + t * kTile, mul(Vec::set1(widths[t]), load_tile(x_at(t), count)));
                store_whole(y + t * kTile, zero_pair());
            }
            float_rows(static_cast<const T*>(a.b) + row * a.b_stride + group * a.depth, a.b_stride, rows, a.depth, space, b);
            float_rows(static_cast<const T*>(a.c) + row * a.c_stride + group * a.depth, a.c_stride, rows, a.depth,
                       space + (sizeof(T) == 4 ? 0 : kChunk * kMaxStateRows), c);
            std::int64_t n = 0;
            for (; n + 4 <= a.depth; n += 4) ssd_rows<4>(tile, n, rows, decay, u, y, b, c);
            for (; n < a.depth; ++n) ssd_rows<1>(tile, n, rows, decay, u, y, b, c);
            for (std::int64_t t = 0; t < rows; ++t) {
                Pair out = load_whole(y + t * kTile);
                if (a.d) out = fma(skip, load_tile(x_at(t), count), out);
                store_tile(static_cast<T*>(a.out) + ((row + t) * a.heads + head) * a.width + column, out, count);
            }
        }
    };
    walk(a.plan, request, run, [&](std::int64_t slot) { write_tile(tile, a.width, a.depth, count, states + slot * size); });
}

// `Rows` rows of the state from `n` on: h = decay h + b u, y += c h.
template <int Rows>
inline void ssd_single_rows(const Single& one, std::int64_t n, std::int64_t width, Reg stays, const float* b, const float* c,
                            const float* u, float* y) {
    const float* from = one.from ? one.from + n * width : nullptr;
    float* to = one.to ? one.to + n * width : nullptr;
    for_vectors(one.begin, one.end, [&](std::int64_t j, std::int64_t count) {
        const Reg in = Vec::load(u + j - one.begin);
        Reg sum = Vec::load(y + j - one.begin);
#pragma GCC unroll 4
        for (std::int64_t i = 0; i < Rows; ++i) {
            const Reg old = Vec::mul(stays, load_state(from ? from + i * width + j : nullptr, count));
            const Reg h = Vec::fma(Vec::set1(b[n + i]), in, old);
            if (to) store_some(to + i * width + j, h, count);
            sum = Vec::fma(Vec::set1(c[n + i]), h, sum);
        }
        Vec::store(y + j - one.begin, sum);
    });
}

template <class T>
inline void ssd_single(const SsdArgs& a, std::int64_t head, const Single& one) {
    const std::int64_t group = head / (a.heads / a.groups);
    alignas(64) float space[sizeof(T) == 4 ? 1 : 2 * kMaxStateRows], u[kColumns], y[kColumns], widths[kChunk], decay[kChunk];
    const float *b, *c;
    ssd_steps(a, head, one.row, 1, widths, decay);
    float_rows(static_cast<const T*>(a.b) + one.row * a.b_stride + group * a.depth, a.b_stride, 1, a.depth, space, &b);
    float_rows(static_cast<const T*>(a.c) + one.row * a.c_stride + group * a.depth, a.c_stride, 1, a.depth,
               space + (sizeof(T) == 4 ? 0 : kMaxStateRows), &c);
    const T* x = static_cast<const T*>(a.x) + one.row * a.x_stride + head * a.width;
    for_vectors(one.begin, one.end, [&](std::int64_t j, std::int64_t count) {
        Vec::store(u + j - one.begin, Vec::mul(Vec::set1(widths[0]), load_some(x + j, count)));
        Vec::store(y + j - one.begin, Vec::zero());
    });
    const Reg stays = Vec::set1(decay[0]), skip = a.d ? Vec::set1(a.d[head]) : Vec::zero();
    std::int64_t n = 0;
    for (; n + 4 <= a.depth; n += 4) ssd_single_rows<4>(one, n, a.width, stays, b, c, u, y);
    for (; n < a.depth; ++n) ssd_single_rows<1>(one, n, a.width, stays, b, c, u, y);
    T* out = static_cast<T*>(a.out) + (one.row * a.heads + head) * a.width;
    for_vectors(one.begin, one.end, [&](std::int64_t j, std::int64_t count) {
        const Reg sum = Vec::load(y + j - one.begin);
        store_some(out + j, a.d ? Vec::fma(skip, load_some(x + j, count), sum) : sum, count);
    });
}

inline void ssd_scan(const SsdArgs& a, std::int64_t begin, std::int64_t end) {
    for_tasks(
        a.plan, a.heads, a.depth, a.width, a.state, begin, end,
        [&](std::int64_t request, std::int64_t head, std::int64_t column) {
            a.type == DType::float32 ? ssd_tile<float>(a, request, head, column) : ssd_tile<bf16>(a, request, head, column);
        },
        [&](std::int64_t head, const Single& one) {
            a.type == DType::float32 ? ssd_single<float>(a, head, one) : ssd_single<bf16>(a, head, one);
        });
}

template <class T>
inline void selective_tile(const SelectiveArgs& a, std::int64_t request, std::int64_t column) {
    const std::int64_t count = a.width - column < kTile ? a.width - column : kTile, size = a.depth * a.width;
    float* states = a.state + column;
    alignas(64) float tile[kMaxStateRows * kTile], slopes[kMaxStateRows * kTile];
    const std::int32_t read = a.plan.read[request];
    read_tile(read < 0 ? nullptr : states + read * size, a.width, a.depth, count, tile);
    read_tile(a.a + column, a.width, a.depth, count, slopes);
    for (std::int64_t n = 0; n < a.depth; ++n) store_whole(slopes + n * kTile, mul(Vec::set1(kLog2E), load_whole(slopes + n * kTile)));
    alignas(64) float b[kMaxStateRows], c[kMaxStateRows];
    const Pair bias = a.dt_bias ? load_tile(a.dt_bias + column, count) : zero_pair();
    const Pair skip = a.d ? load_tile(a.d + column, count) : zero_pair();
    const auto run = [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            const Pair x = load_tile(static_cast<const T*>(a.x) + t * a.x_stride + column, count);
            const Pair dt = add(load_tile(static_cast<const T*>(a.dt) + t * a.dt_stride + column, count), bias);
            const Pair width = {softplus(dt.lo), softplus(dt.hi)};
            const Pair u = mul(width, x);
            copy_converted(static_cast<const T*>(a.b) + t * a.b_stride, b, a.depth);
            copy_converted(static_cast<const T*>(a.c) + t * a.c_stride, c, a.depth);
            Pair y = zero_pair();
            for (std::int64_t n = 0; n < a.depth; ++n) {
                const Pair steep = mul(width, load_whole(slopes + n * kTile));
                const Pair decayed = mul({exp2_falling(steep.lo), exp2_falling(steep.hi)}, load_whole(tile + n * kTile));
                const Pair h = fma(Vec::set1(b[n]), u, decayed);
                store_whole(tile + n * kTile, h);
                y = fma(Vec::set1(c[n]), h, y);
            }
            if (a.d) y = fma(skip, x, y);
            if (a.gate) {
                const Pair z = load_tile(static_cast<const T*>(a.gate) + t * a.gate_stride + column, count);
                y = mul(y, {gate(z.lo, z.lo), gate(z.hi, z.hi)});
            }
            store_tile(static_cast<T*>(a.out) + t * a.width + column, y, count);
        }
    };
    walk(a.plan, request, run, [&](std::int64_t slot) { write_tile(tile, a.width, a.depth, count, states + slot * size); });
}

template <class T>
inline void selective_single(const SelectiveArgs& a, const Single& one) {
    alignas(64) float widths[kColumns], u[kColumns], y[kColumns];
    const auto row_of = [&](const void* rows, std::int64_t stride) { return static_cast<const T*>(rows) + one.row * stride; };
    const T *x = row_of(a.x, a.x_stride), *b = row_of(a.b, a.b_stride), *c = row_of(a.c, a.c_stride), *dt = row_of(a.dt, a.dt_stride);
    for_vectors(one.begin, one.end, [&](std::int64_t j, std::int64_t count) {
        const Reg bias = a.dt_bias ? load_some(a.dt_bias + j, count) : Vec::zero();
        const Reg width = softplus(Vec::add(load_some(dt + j, count), bias));
        Vec::store(widths + j - one.begin, width);
        Vec::store(u + j - one.begin, Vec::mul(width, load_some(x + j, count)));
        Vec::store(y + j - one.begin, Vec::zero());
    });
    for (std::int64_t n = 0; n < a.depth; ++n) {
        const float *slopes = a.a + n * a.width, *from = one.from ? one.from + n * a.width : nullptr;
        float* to = one.to ? one.to + n * a.width : nullptr;
        const Reg key = Vec::set1(element(b + n)), query = Vec::set1(element(c + n));
        // The next row of the state is too far away for the machine to see it coming.
        const std::int64_t ahead = n + 1 < a.depth ? a.width : 0;
        for_vectors(one.begin, one.end, [&](std::int64_t j, std::int64_t count) {
            __builtin_prefetch(slopes + ahead + j);
            if (from) __builtin_prefetch(from + ahead + j, 1);
            const Reg slope = Vec::mul(Vec::set1(kLog2E), load_some(slopes + j, count));
            const Reg decay = exp2_falling(Vec::mul(Vec::load(widths + j - one.begin), slope));
            const Reg decayed = Vec::mul(decay, load_state(from ? from + j : nullptr, count));
            const Reg h = Vec::fma(key, Vec::load(u + j - one.begin), decayed);
            if (to) store_some(to + j, h, count);
            Vec::store(y + j - one.begin, Vec::fma(query, h, Vec::load(y + j - one.begin)));
        });
    }
    T* out = static_cast<T*>(a.out) + one.row * a.width;
    for_vectors(one.begin, one.end, [&](std::int64_t j, std::int64_t count) {
        Reg sum = Vec::load(y + j - one.begin);
        if (a.d) sum = Vec::fma(load_some(a.d + j, count), load_some(x + j, count), sum);
        if (a.gate) {
            const Reg z = load_some(row_of(a.gate, a.gate_stride) + j, count);
            sum = Vec::mul(sum, gate(z, z));
        }
        store_some(out + j, sum, count);
    });
}

inline void selective_scan(const SelectiveArgs& a, std::int64_t begin, std::int64_t end) {
    for_tasks(
        a.plan, 1, a.depth, a.width, a.state, begin, end,
        [&](std::int64_t request, std::int64_t, std::int64_t column) {
            a.type == DType::float32 ? selective_tile<float>(a, request, column) : selective_tile<bf16>(a, request, column);
        },
        [&](std::int64_t, const Single& one) {
            a.type == DType::float32 ? selective_single<float>(a, one) : selective_single<bf16>(a, one);
        });
}

// One row of the delta rule over a tile. `Update`: take the row in and give its output. `Next`: let the state decay for the row
// that follows, and gather what it holds under that row's key. Fused, so that the state is read and written once a row; an
// element goes through the same operations as if it were not.
template <bool Update, bool Next, bool EachChannel>
inline void delta_row(float* tile, std::int64_t depth, const float* k, const float* q, Pair u, const float* decay, const float* next_k,
                      Pair& out, Pair& held) {
    Pair outs[2] = {zero_pair(), zero_pair()}, helds[2] = {zero_pair(), zero_pair()};
    const Reg same = Next && !EachChannel ? Vec::set1(decay[0]) : Vec::zero();
    const auto one = [&](std::int64_t i, int j) {
        Pair s = load_whole(tile + i * kTile);
        if constexpr (Update) {
            s = fma(Vec::set1(k[i]), u, s);
            outs[j] = fma(Vec::set1(q[i]), s, outs[j]);
        }
        if constexpr (Next) {
            s = mul(EachChannel ? Vec::set1(decay[i]) : same, s);
            helds[j] = fma(Vec::set1(next_k[i]), s, helds[j]);
        }
        store_whole(tile + i * kTile, s);
    };
    std::int64_t i = 0;
    for (; i + 2 <= depth; i += 2) {
        one(i, 0);
        one(i + 1, 1);
    }
    if (i < depth) one(i, 0);
    out = add(outs[0], outs[1]);
    held = add(helds[0], helds[1]);
}

template <class T, bool EachChannel>
inline void delta_tile(const DeltaArgs& a, std::int64_t request, std::int64_t head, std::int64_t column) {
    const std::int64_t count = a.width - column < kTile ? a.width - column : kTile;
    const std::int64_t group = head / (a.heads / a.groups), size = a.heads * a.depth * a.width, channels = EachChannel ? a.depth : 1;
    float* states = a.state + head * a.depth * a.width + column;
    alignas(64) float tile[kMaxStateRows * kTile];
    const std::int32_t read = a.plan.read[request];
    read_tile(read < 0 ? nullptr : states + read * size, a.width, a.depth, count, tile);
    const auto q_at = [&](std::int64_t t) { return a.q + t * a.q_stride + group * a.depth; };
    const auto k_at = [&](std::int64_t t) { return a.k + t * a.k_stride + group * a.depth; };
    const auto decay_at = [&](std::int64_t t) { return a.decay + (t * a.heads + head) * channels; };
    const auto run = [&](std::int64_t begin, std::int64_t end) {
        Pair out, held;
        delta_row<false, true, EachChannel>(tile, a.depth, nullptr, nullptr, zero_pair(), decay_at(begin), k_at(begin), out, held);
        for (std::int64_t t = begin; t < end; ++t) {
            const Pair v = load_tile(static_cast<const T*>(a.v) + t * a.v_stride + head * a.width + column, count);
            const Reg beta = gate(Vec::set1(a.beta_scale), Vec::set1(element(a.beta, a.beta_type, t * a.beta_stride + head)));
            const Pair u = mul(beta, sub(v, held));
            if (t + 1 < end) {
                delta_row<true, true, EachChannel>(tile, a.depth, k_at(t), q_at(t), u, decay_at(t + 1), k_at(t + 1), out, held);
            } else {
                delta_row<true, false, EachChannel>(tile, a.depth, k_at(t), q_at(t), u, nullptr, nullptr, out, held);
            }
            store_tile(static_cast<T*>(a.out) + (t * a.heads + head) * a.width + column, out, count);
        }
    };
    walk(a.plan, request, run, [&](std::int64_t slot) { write_tile(tile, a.width, a.depth, count, states + slot * size); });
}

// What a single row's pass over the state adds up, even and odd rows apart.
struct DeltaSums {
    alignas(64) float even[kColumns], odd[kColumns];
};

// `Rows` rows of the state from `i` on, an even number before them. Without `Update`: let them decay, and gather what they hold under
// the key. With it: the same, then take the row in (s += k u), and gather the output; they go to `to`.
template <int Rows, bool Update, bool EachChannel>
inline void delta_single_rows(const Single& one, std::int64_t i, std::int64_t depth, std::int64_t width, const float* decay, const float* k,
                              const float* q, const float* u, DeltaSums& sums) {
    const float* from = one.from ? one.from + i * width : nullptr;
    float* to = one.to ? one.to + i * width : nullptr;
    // While this head's state is at hand and its rows are taken in, memory brings the next one's.
    const float* ahead = Update && one.more && from ? from + depth * width : nullptr;
    for_vectors(one.begin, one.end, [&](std::int64_t j, std::int64_t count) {
        const std::int64_t at = j - one.begin;
        Reg total[2] = {Vec::load(sums.even + at), Rows > 1 ? Vec::load(sums.odd + at) : Vec::zero()};
#pragma GCC unroll 4
        for (std::int64_t r = 0; r < Rows; ++r) {
            if (ahead) __builtin_prefetch(ahead + r * width + j, 1, 2);
            Reg s = load_state(from ? from + r * width + j : nullptr, count);
            s = Vec::mul(Vec::set1(decay[EachChannel ? i + r : 0]), s);
            if constexpr (Update) {
                s = Vec::fma(Vec::set1(k[i + r]), Vec::load(u + at), s);
                if (to) store_some(to + r * width + j, s, count);
                total[r % 2] = Vec::fma(Vec::set1(q[i + r]), s, total[r % 2]);
            } else {
                total[r % 2] = Vec::fma(Vec::set1(k[i + r]), s, total[r % 2]);
            }
        }
        Vec::store(sums.even + at, total[0]);
        if (Rows > 1) Vec::store(sums.odd + at, total[1]);
    });
}

template <bool Update, bool EachChannel>
inline void delta_single_pass(const Single& one, std::int64_t depth, std::int64_t width, const float* decay, const float* k, const float* q,
                              const float* u, DeltaSums& sums) {
    for_vectors(0, one.end - one.begin, [&](std::int64_t j, std::int64_t) {
        Vec::store(sums.even + j, Vec::zero());
        Vec::store(sums.odd + j, Vec::zero());
    });
    std::int64_t i = 0;
    for (; i + 4 <= depth; i += 4) delta_single_rows<4, Update, EachChannel>(one, i, depth, width, decay, k, q, u, sums);
    if (i + 2 <= depth) {
        delta_single_rows<2, Update, EachChannel>(one, i, depth, width, decay, k, q, u, sums);
        i += 2;
    }
    if (i < depth) delta_single_rows<1, Update, EachChannel>(one, i, depth, width, decay, k, q, u, sums);
}

template <class T, bool EachChannel>
inline void delta_single(const DeltaArgs& a, std::int64_t head, const Single& one) {
    const std::int64_t group = head / (a.heads / a.groups), channels = EachChannel ? a.depth : 1;
    const float *q = a.q + one.row * a.q_stride + group * a.depth, *k = a.k + one.row * a.k_stride + group * a.depth;
    const float* decay = a.decay + (one.row * a.heads + head) * channels;
    const T* v = static_cast<const T*>(a.v) + one.row * a.v_stride + head * a.width;
    T* out = static_cast<T*>(a.out) + (one.row * a.heads + head) * a.width;
    alignas(64) float u[kColumns];
    DeltaSums sums;
    delta_single_pass<false, EachChannel>(one, a.depth, a.width, decay, k, nullptr, nullptr, sums);
    const Reg beta = gate(Vec::set1(a.beta_scale), Vec::set1(element(a.beta, a.beta_type, one.row * a.beta_stride + head)));
    for_vectors(one.begin, one.end, [&](std::int64_t j, std::int64_t count) {
        const std::int64_t at = j - one.begin;
        const Reg held = Vec::add(Vec::load(sums.even + at), Vec::load(sums.odd + at));
        Vec::store(u + at, Vec::mul(beta, Vec::sub(load_some(v + j, count), held)));
    });
    delta_single_pass<true, EachChannel>(one, a.depth, a.width, decay, k, q, u, sums);
    for_vectors(one.begin, one.end, [&](std::int64_t j, std::int64_t count) {
        const std::int64_t at = j - one.begin;
        store_some(out + j, Vec::add(Vec::load(sums.even + at), Vec::load(sums.odd + at)), count);
    });
}

template <class T>
inline void delta_tasks(const DeltaArgs& a, std::int64_t begin, std::int64_t end) {
    for_tasks(
        a.plan, a.heads, a.depth, a.width, a.state, begin, end,
        [&](std::int64_t request, std::int64_t head, std::int64_t column) {
            a.each_channel ? delta_tile<T, true>(a, request, head, column) : delta_tile<T, false>(a, request, head, column);
        },
        [&](std::int64_t head, const Single& one) {
            a.each_channel ? delta_single<T, true>(a, head, one) : delta_single<T, false>(a, head, one);
        });
}

inline void gated_delta(const DeltaArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? delta_tasks<float>(a, begin, end) : delta_tasks<bf16>(a, begin, end);
}

template <class T>
inline void l2_rows(const L2NormArgs& a, std::int64_t begin, std::int64_t end) {
    for (std::int64_t run = begin * a.heads; run < end * a.heads; ++run) {
        const T* x = static_cast<const T*>(a.x) + run / a.heads * a.x_stride + run % a.heads * a.width;
        const Reg factor = Vec::set1(a.scale / __builtin_sqrtf(sum_of_squares(x, a.width) + a.eps));
        float* out = a.out + run * a.width;
        for (std::int64_t i = 0; i < a.width; i += Vec::width) {
            store_some(out + i, Vec::mul(load_some(x + i, a.width - i), factor), a.width - i);
        }
    }
}

inline void l2_norm(const L2NormArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? l2_rows<float>(a, begin, end) : l2_rows<bf16>(a, begin, end);
}

template <class T>
inline void decay_rows(const DecayArgs& a, std::int64_t begin, std::int64_t end) {
    const Reg bound = Vec::set1(a.lower_bound);
    for (std::int64_t run = begin * a.heads; run < end * a.heads; ++run) {
        const std::int64_t head = run % a.heads;
        const T* x = static_cast<const T*>(a.x) + run / a.heads * a.x_stride + head * a.width;
        const float* bias = a.bias + head * a.width;
        const Reg factor = Vec::set1(a.a[head]);
        for (std::int64_t i = 0; i < a.width; i += Vec::width) {
            const std::int64_t rest = a.width - i;
            const Reg wide = Vec::add(load_some(x + i, rest), load_some(bias + i, rest));
            // sigmoid(-y) is 1 / (1 + e^y): the gate of 1 by -y.
            const Reg slope = Vec::sub(Vec::zero(), Vec::mul(factor, wide));
            const Reg log = a.lower_bound != 0 ? gate(bound, slope) : Vec::mul(factor, softplus(wide));
            store_some(a.out + run * a.width + i, exp(log), rest);
        }
    }
}

inline void decay_gate(const DecayArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? decay_rows<float>(a, begin, end) : decay_rows<bf16>(a, begin, end);
}

inline Reg gate_of(bool sigmoid, Reg z) { return gate(sigmoid ? Vec::set1(1.0f) : z, z); }

template <class T>
inline void gated_norm_rows(const GatedNormArgs& a, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
        for (std::int64_t at = 0; at < a.width; at += a.group) {
            const T *x = static_cast<const T*>(a.x) + row * a.x_stride + at, *z = static_cast<const T*>(a.gate) + row * a.gate_stride + at;
            const float* weight = a.weight + (a.shared_weight ? 0 : at);
            T* out = static_cast<T*>(a.out) + row * a.width + at;
            const auto value = [&](std::int64_t i, std::int64_t rest) {
                const Reg v = load_some(x + i, rest);
                return a.gate_first ? Vec::mul(v, gate_of(a.sigmoid, load_some(z + i, rest))) : v;
            };
            Reg squares = Vec::zero();
            for (std::int64_t i = 0; i < a.group; i += Vec::width) {
                const Reg v = value(i, a.group - i);
                squares = Vec::fma(v, v, squares);
            }
            const Reg factor = Vec::set1(1.0f / __builtin_sqrtf(Vec::sum(squares) / static_cast<float>(a.group) + a.eps));
            for (std::int64_t i = 0; i < a.group; i += Vec::width) {
                const std::int64_t rest = a.group - i;
                Reg v = Vec::mul(Vec::mul(value(i, rest), factor), load_some(weight + i, rest));
                if (!a.gate_first) v = Vec::mul(v, gate_of(a.sigmoid, load_some(z + i, rest)));
                store_some(out + i, v, rest);
            }
        }
    }
}

inline void gated_rms_norm(const GatedNormArgs& a, std::int64_t begin, std::int64_t end) {
    a.type == DType::float32 ? gated_norm_rows<float>(a, begin, end) : gated_norm_rows<bf16>(a, begin, end);
}

}  // namespace canter::CANTER_ISA
