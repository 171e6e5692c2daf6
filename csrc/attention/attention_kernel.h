// Included once per instruction set, after gemm/linear_kernel.h.

namespace canter::CANTER_ISA {

template <class S, class D>
inline void copy_converted(const S* source, D* out, std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += Vec::width) store_some(out + i, load_some(source + i, count - i), count - i);
}

template <class T, class C>
inline void write_kv_rows(const WriteKVArgs& a, std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
        if (a.slots[t] < 0) continue;
        const std::int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
        for (std::int64_t h = 0; h < a.heads; ++h) {
            const std::int64_t at = (h * a.block_size + offset) * a.head_dim;
            copy_converted(static_cast<const T*>(a.k) + t * a.k_stride + h * a.head_dim,
                           static_cast<C*>(a.k_cache.data) + block * a.k_cache.block_stride + at, a.head_dim);
            copy_converted(static_cast<const T*>(a.v) + t * a.v_stride + h * a.head_dim,
                           static_cast<C*>(a.v_cache.data) + block * a.v_cache.block_stride + at, a.head_dim);
        }
    }
}

inline void write_kv(const WriteKVArgs& a, std::int64_t begin, std::int64_t end) {
    const bool wide = a.cache_type == DType::float32;
    if (a.type == DType::float32) wide ? write_kv_rows<float, float>(a, begin, end) : write_kv_rows<float, bf16>(a, begin, end);
    else wide ? write_kv_rows<bf16, float>(a, begin, end) : write_kv_rows<bf16, bf16>(a, begin, end);
}

// What a tile's queries carry from one key tile to the next; rows are tokens times heads, heads innermost.
struct AttentionState {
    float *q, *sums, *scores, *highest, *totals, *keys, *values;
};

// Keys [first, last) of a tile that begins at position `tile`: one float row of head_dim for each.
struct KeyTile {
    const float *keys[kKeyTile], *values[kKeyTile];
};

template <class C>
inline const C* cache_row(const AttentionArgs& a, const CacheView& cache, const std::int32_t* table, std::int64_t head, std::int64_t position) {
    const std::int64_t block = table[position / a.block_size], offset = position % a.block_size;
    return static_cast<const C*>(cache.data) + block * cache.block_stride + (head * a.block_size + offset) * a.head_dim;
}

template <class C>
inline void find_keys(const AttentionArgs& a, const AttentionState& s, const std::int32_t* table, std::int64_t head, std::int64_t begin,
                      std::int64_t end, KeyTile& tile) {
    for (std::int64_t p = begin; p < end; ++p) {
        const std::int64_t j = p % kKeyTile;
        const C* key = cache_row<C>(a, a.k_cache, table, head, p);
        const C* value = cache_row<C>(a, a.v_cache, table, head, p);
        if constexpr (sizeof(C) == sizeof(float)) {
            tile.keys[j] = key;
            tile.values[j] = value;
        } else {
            copy_converted(key, s.keys + j * a.head_dim, a.head_dim);
            copy_converted(value, s.values + j * a.head_dim, a.head_dim);
            tile.keys[j] = s.keys + j * a.head_dim;
            tile.values[j] = s.values + j * a.head_dim;
        }
    }
}

// Turn the scores of keys [low, high) into weights, and fold the change of the running maximum into sums and totals.
inline void weigh_row(const AttentionArgs& a, const AttentionState& s, std::int64_t row, std::int64_t low, std::int64_t high) {
    float* scores = s.scores + row * kKeyTile;
    constexpr float nothing = -__builtin_inff();
    for (std::int64_t j = 0; j < kKeyTile; j += Vec::width) {
        Reg v = Vec::mul(Vec::load(scores + j), Vec::set1(a.scale));
        if (a.softcap > 0) v = cap_scores(v, a.softcap);
        Vec::store(scores + j, v);
    }
    for (std::int64_t j = 0; j < low; ++j) scores[j] = nothing;
    for (std::int64_t j = high; j < kKeyTile; ++j) scores[j] = nothing;
    Reg top = Vec::load(scores);
    for (std::int64_t j = Vec::width; j < kKeyTile; j += Vec::width) top = Vec::max(top, Vec::load(scores + j));
    const float before = s.highest[row], found = Vec::highest(top), highest = found > before ? found : before;
    Reg sum = Vec::zero();
    for (std::int64_t j = 0; j < kKeyTile; j += Vec::width) {
        const Reg weight = exp(Vec::sub(Vec::load(scores + j), Vec::set1(highest)));
        Vec::store(scores + j, weight);
        sum = Vec::add(sum, weight);
    }
    float total = s.totals[row];
    if (highest != before) {
        float lanes[Vec::width];
        Vec::store(lanes, exp(Vec::set1(before - highest)));
        const Reg fade = Vec::set1(lanes[0]);
        total *= lanes[0];
        float* sums = s.sums + row * a.head_dim;
        for (std::int64_t d = 0; d < a.head_dim; d += Vec::width) {
            store_some(sums + d, Vec::mul(load_some(sums + d, a.head_dim - d), fade), a.head_dim - d);
        }
        s.highest[row] = highest;
    }
    s.totals[row] = total + Vec::sum(sum);
}

// Add the weighted values of keys [low, high) to the sums of R rows, V vectors of the head at a time.
template <int R, int V>
inline void add_values(const AttentionArgs& a, const AttentionState& s, const KeyTile& tile, std::int64_t row, std::int64_t d, std::int64_t low,
                       std::int64_t high) {
    // Several vectors are whole ones; a single one may be the head's last, cut short.
    const auto load = [&](const float* p) { return V > 1 ? Vec::load(p) : load_some(p, a.head_dim - d); };
    Reg sums[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) sums[r][v] = load(s.sums + (row + r) * a.head_dim + d + v * Vec::width);
    }
    for (std::int64_t j = low; j < high; ++j) {
        Reg values[V];
        for (int v = 0; v < V; ++v) values[v] = load(tile.values[j] + d + v * Vec::width);
        for (int r = 0; r < R; ++r) {
            const Reg weight = Vec::set1(s.scores[(row + r) * kKeyTile + j]);
            for (int v = 0; v < V; ++v) sums[r][v] = Vec::fma(weight, values[v], sums[r][v]);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) {
            float* place = s.sums + (row + r) * a.head_dim + d + v * Vec::width;
            V > 1 ? Vec::store(place, sums[r][v]) : store_some(place, sums[r][v], a.head_dim - d);
        }
    }
}

template <int R>
inline void add_all_values(const AttentionArgs& a, const AttentionState& s, const KeyTile& tile, std::int64_t row, std::int64_t low,
                           std::int64_t high) {
    constexpr int V = R == 1 ? 4 : 2;
    std::int64_t d = 0;
    for (; d + V * Vec::width <= a.head_dim; d += V * Vec::width) add_values<R, V>(a, s, tile, row, d, low, high);
    for (; d < a.head_dim; d += Vec::width) add_values<R, 1>(a, s, tile, row, d, low, high);
}

inline std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) { return x < low ? low : x > high ? high : x; }

template <class T>
inline void attention_begin(const AttentionArgs& a, const AttentionTile& t, const AttentionState& s) {
    const std::int64_t heads = t.head_end - t.head_begin;
    for (std::int64_t token = t.begin; token < t.end; ++token) {
        const T* q = static_cast<const T*>(a.q) + token * a.q_stride + t.head_begin * a.head_dim;
        copy_converted(q, s.q + (token - t.begin) * heads * a.head_dim, heads * a.head_dim);
    }
    const std::int64_t rows = (t.end - t.begin) * heads;
    __builtin_memset(s.sums, 0, static_cast<std::size_t>(rows * a.head_dim) * sizeof(float));
    for (std::int64_t r = 0; r < rows; ++r) {
        s.highest[r] = -__builtin_inff();
        s.totals[r] = 0.0f;
    }
}

template <class T>
inline void attention_end(const AttentionArgs& a, const AttentionTile& t, const AttentionState& s) {
    const std::int64_t heads = t.head_end - t.head_begin;
    for (std::int64_t r = 0; r < (t.end - t.begin) * heads; ++r) {
        T* out = static_cast<T*>(a.out) + ((t.begin + r / heads) * a.q_heads + t.head_begin + r % heads) * a.head_dim;
        const float* sums = s.sums + r * a.head_dim;
        const Reg total = Vec::set1(s.totals[r]);
        for (std::int64_t d = 0; d < a.head_dim; d += Vec::width) {
            store_some(out + d, Vec::div(load_some(sums + d, a.head_dim - d), total), a.head_dim - d);
        }
    }
}

template <class C>
inline void attention_walk(const AttentionArgs& a, const AttentionTile& t, const AttentionState& s) {
    const std::int32_t* table = a.block_table + t.request * a.table_width;
    const std::int64_t heads = t.head_end - t.head_begin, rows = (t.end - t.begin) * heads;
    const std::int64_t key_head = t.head_begin / (a.q_heads / a.k_heads);
    // Position of this tile's first token, and where its keys begin and end.
    const std::int64_t first = a.seq_lens[t.request] - a.query_start_loc[t.request + 1] + t.begin;
    const std::int64_t last = first + (t.end - t.begin);
    const auto window_begin = [&](std::int64_t position) { return a.window > 0 && position >= a.window ? position - a.window + 1 : 0; };
    KeyTile tile{};
    for (std::int64_t base = window_begin(first) / kKeyTile * kKeyTile; base < last; base += kKeyTile) {
        const std::int64_t key_low = clamp(window_begin(first) - base, 0, kKeyTile), key_high = clamp(last - base, 0, kKeyTile);
        find_keys<C>(a, s, table, key_head, base + key_low, base + key_high, tile);
        const auto key_of = [&](std::int64_t j) { return tile.keys[key_low + j]; };
        dot_panel<float>(s.q, a.head_dim, rows, key_of, key_high - key_low, 0, a.head_dim, s.scores + key_low, kKeyTile, false);
        const auto low_of = [&](std::int64_t r) { return clamp(window_begin(first + r / heads) - base, 0, kKeyTile); };
        const auto high_of = [&](std::int64_t r) { return clamp(first + r / heads + 1 - base, 0, kKeyTile); };
        for (std::int64_t r = 0; r < rows; ++r) {
            if (low_of(r) < high_of(r)) weigh_row(a, s, r, low_of(r), high_of(r));
        }
        for (std::int64_t r = 0; r < rows;) {
            const std::int64_t low = low_of(r), high = high_of(r);
            const bool four = r + 4 <= rows && low_of(r + 3) == low && high_of(r + 3) == high;
            if (low < high) four ? add_all_values<4>(a, s, tile, r, low, high) : add_all_values<1>(a, s, tile, r, low, high);
            r += four ? 4 : 1;
        }
    }
}

// `scratch` holds attention_scratch(tokens * heads, head_dim) floats.
inline void attention(const AttentionArgs& a, const AttentionTile& t, float* scratch) {
    const std::int64_t rows = (t.end - t.begin) * (t.head_end - t.head_begin), area = rows * a.head_dim;
    AttentionState s{};
    s.scores = scratch;
    s.q = s.scores + rows * kKeyTile;
    s.sums = s.q + area;
    s.keys = s.sums + area;
    s.values = s.keys + kKeyTile * a.head_dim;
    s.highest = s.values + kKeyTile * a.head_dim;
    s.totals = s.highest + rows;
    a.type == DType::float32 ? attention_begin<float>(a, t, s) : attention_begin<bf16>(a, t, s);
    a.cache_type == DType::float32 ? attention_walk<float>(a, t, s) : attention_walk<bf16>(a, t, s);
    a.type == DType::float32 ? attention_end<float>(a, t, s) : attention_end<bf16>(a, t, s);
}

}  // namespace canter::CANTER_ISA
