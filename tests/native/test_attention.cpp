// The paged cache: what is written to it, and attention over it, for every type of cache.

#include <algorithm>

#include "attention/attention.h"
#include "attention/kernels.h"
#include "attention/plan.h"
#include "blocks.h"
#include "check.h"
#include "isa/isa.h"

namespace canter::test {
namespace {

constexpr CacheType kCacheTypes[] = {CacheType::float32, CacheType::bfloat16, CacheType::float16, CacheType::fp8_e4m3, CacheType::int8};

double fp8_value(std::uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    if ((code & 127) == 127) return NAN;
    const double size = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
    return code & 128 ? -size : size;
}

// Keys and values of some blocks of positions, filled with NaN (int8: NaN scales), so that nobody reads what is not written.
struct Cache {
    CacheType type;
    std::int64_t blocks, block_size, heads, head_dim, value_dim, bytes, block_bytes, scale_stride;
    bool one;  // v holds the keys, which lie as values do and begin with them
    Buffer<std::uint32_t> k, v;  // aligned for every type
    Buffer<float> k_scale, v_scale;

    Cache(CacheType type, std::int64_t blocks, std::int64_t block_size, std::int64_t heads, std::int64_t head_dim, std::int64_t value_dim,
          bool one = false)
        : type(type), blocks(blocks), block_size(block_size), heads(heads), head_dim(head_dim), value_dim(value_dim),
          bytes(cache_bytes(type)), block_bytes(heads * std::max(head_dim, value_dim) * block_size * bytes + 16),
          scale_stride(heads * block_size + 1), one(one),
          k((blocks * block_bytes - 16 + 3) / 4), v(k.size()), k_scale(blocks * scale_stride - 1), v_scale(k_scale.size()) {
        std::memset(k.data(), type == CacheType::fp8_e4m3 ? 0x7f : 0xff, static_cast<std::size_t>(4 * k.size()));
        std::memset(v.data(), type == CacheType::fp8_e4m3 ? 0x7f : 0xff, static_cast<std::size_t>(4 * v.size()));
        for (std::int64_t i = 0; i < k_scale.size(); ++i) k_scale[i] = v_scale[i] = NAN;
    }

    CacheView view(Buffer<std::uint32_t>& data) { return {data.data(), block_bytes}; }
    ScaleView view(Buffer<float>& scales) { return {type == CacheType::int8 ? scales.data() : nullptr, scale_stride}; }

    double element(const Buffer<std::uint32_t>& data, const Buffer<float>& scales, std::int64_t slot, std::int64_t head,
                   std::int64_t index) const {
        const std::int64_t block = slot / block_size;
        const std::uint8_t* p = reinterpret_cast<const std::uint8_t*>(data.data()) + block * block_bytes + index * bytes;
        switch (type) {
            case CacheType::float32: {
                float x;
                std::memcpy(&x, p, sizeof x);
                return x;
            }
            case CacheType::bfloat16: {
                bf16 x;
                std::memcpy(&x, p, sizeof x);
                return to_float(x);
            }
            case CacheType::float16: return half_value(p);
            case CacheType::fp8_e4m3: return fp8_value(*p);
            default:
                return static_cast<double>(static_cast<std::int8_t>(*p)) *
                    scales[block * scale_stride + head * block_size + slot % block_size];
        }
    }
    double key(std::int64_t slot, std::int64_t head, std::int64_t d) const {
        if (one) return element(v, v_scale, slot, head, (head * block_size + slot % block_size) * head_dim + d);
        const std::int64_t x = type == CacheType::float16 ? 1 : 4 / bytes;
        return element(k, k_scale, slot, head, ((head * (head_dim / x) + d / x) * block_size + slot % block_size) * x + d % x);
    }
    double value(std::int64_t slot, std::int64_t head, std::int64_t d) const {
        return element(v, v_scale, slot, head, (head * block_size + slot % block_size) * (one ? head_dim : value_dim) + d);
    }
};

template <class T>
void write(Cache& cache, const Buffer<T>& k, const Buffer<T>& v, std::int64_t k_stride, std::int64_t v_stride,
           const Buffer<std::int64_t>& slots) {
    if (cache.one) {
        write_kv({nullptr, k.data(), dtype_of<T>, 0, k_stride, cache.view(cache.v), cache.view(cache.v), cache.type, {}, {}, slots.data(),
                  slots.size(), cache.heads, 0, cache.head_dim, cache.blocks, cache.block_size});
        return;
    }
    write_kv({k.data(), v.data(), dtype_of<T>, k_stride, v_stride, cache.view(cache.k), cache.view(cache.v), cache.type,
              cache.view(cache.k_scale), cache.view(cache.v_scale), slots.data(), slots.size(), cache.heads, cache.head_dim,
              cache.value_dim, cache.blocks, cache.block_size});
}

// What a cache of the type may make of x, in a row whose greatest element is `highest`.
void check_stored(CacheType type, double found, double x, double highest) {
    switch (type) {
        case CacheType::float32: return check_close("stored", 0, found, x, 0, 0);
        case CacheType::bfloat16: return check_close("stored", 0, found, to_float(to_bf16(static_cast<float>(x))), 0, 0);
        case CacheType::float16: return check_close("stored", 0, found, std::clamp(x, -65504.0, 65504.0), 0x1p-11, 0x1p-25);
        case CacheType::fp8_e4m3: return check_close("stored", 0, found, std::clamp(x, -448.0, 448.0), 0x1p-4, 0x1p-10);
        default: return check_close("stored", 0, found, x, 0, 0.501 * highest / 127 + 1e-30);
    }
}

template <class T>
void check_write(Random& random, CacheType type, std::int64_t head_dim, std::int64_t value_dim, std::int64_t block_size, float scale) {
    constexpr std::int64_t rows = 6, heads = 3, blocks = 4;
    Cache cache(type, blocks, block_size, heads, head_dim, value_dim);
    const std::int64_t k_stride = heads * head_dim + 3, v_stride = heads * value_dim + 5;
    const Buffer<T> k = random_buffer<T>(random, (rows - 1) * k_stride + heads * head_dim, scale),
                    v = random_buffer<T>(random, (rows - 1) * v_stride + heads * value_dim, scale);
    Buffer<std::int64_t> slots(rows);
    for (std::int64_t t = 0; t < rows; ++t) slots[t] = t == 2 ? -1 : (t + 1) * blocks * block_size / rows - 1;  // the last slot too
    write(cache, k, v, k_stride, v_stride, slots);
    std::vector<bool> written(static_cast<std::size_t>(blocks * block_size));
    for (std::int64_t t = 0; t < rows; ++t) {
        if (slots[t] < 0) continue;
        written[static_cast<std::size_t>(slots[t])] = true;
        if (std::count(slots.data() + t, slots.data() + rows, slots[t]) > 1) continue;  // written again later
        for (std::int64_t h = 0; h < heads; ++h) {
            const T *key = k.data() + t * k_stride + h * head_dim, *value = v.data() + t * v_stride + h * value_dim;
            double high_k = 0, high_v = 0;
            for (std::int64_t d = 0; d < head_dim; ++d) {
                high_k = std::max(high_k, std::abs(static_cast<double>(to_float(key[d]))));
            }
            for (std::int64_t d = 0; d < value_dim; ++d) {
                high_v = std::max(high_v, std::abs(static_cast<double>(to_float(value[d]))));
            }
            for (std::int64_t d = 0; d < head_dim; ++d) check_stored(type, cache.key(slots[t], h, d), to_float(key[d]), high_k);
            for (std::int64_t d = 0; d < value_dim; ++d) check_stored(type, cache.value(slots[t], h, d), to_float(value[d]), high_v);
        }
    }
    for (std::int64_t slot = 0; slot < blocks * block_size; ++slot) {
        if (written[static_cast<std::size_t>(slot)]) continue;
        for (std::int64_t d = 0; d < head_dim; ++d) CHECK(std::isnan(cache.key(slot, 1, d)));
        for (std::int64_t d = 0; d < value_dim; ++d) CHECK(std::isnan(cache.value(slot, 1, d)));
    }
}

TEST(write_kv) {
    Random random(10);
    for (const CacheType type : kCacheTypes) {
        for (const std::int64_t head_dim : {4, 8, 12, 20, 36, 64, 68, 128}) {
            for (const std::int64_t block_size : {1, 2, 3, 16}) {
                check_write<float>(random, type, head_dim, head_dim, block_size, 3);
                check_write<bf16>(random, type, head_dim, block_size == 3 ? 24 : head_dim, block_size, 3);
            }
        }
        check_write<float>(random, type, 64, 64, 16, 1000);  // beyond fp8's range
        check_write<float>(random, type, 64, 64, 16, 1e5f);  // beyond float16's
        check_write<float>(random, type, 64, 64, 16, 0);
    }
    Cache cache(CacheType::float32, 2, 4, 1, 4, 4);
    const Buffer<float> row(4);
    for (const std::int64_t bad : {-2, 8}) {
        Buffer<std::int64_t> slots(1);
        slots[0] = bad;
        check_throws<std::out_of_range>("write_kv", [&] { write(cache, row, row, 4, 4, slots); });
    }
}

// Every number of a format is kept, ties go to the even code, what is too large stays the largest, and NaN stays.
// `greatest`: its code; value(code): the number.
template <class F>
void check_rounding(CacheType type, int greatest, F value) {
    std::vector<float> values;
    std::vector<double> wanted;
    for (int code = 0; code <= greatest; ++code) {
        const double x = value(code), next = code < greatest ? value(code + 1) : x;
        for (const double sign : {1.0, -1.0}) {
            values.push_back(static_cast<float>(sign * x));
            wanted.push_back(sign * x);
            values.push_back(static_cast<float>(sign * (x + next) / 2));
            wanted.push_back(sign * (code % 2 ? next : x));
        }
    }
    for (const float x : {1e9f, -1e9f, INFINITY, -INFINITY}) {
        values.push_back(x);
        wanted.push_back(x < 0 ? -value(greatest) : value(greatest));
    }
    for (int i = 0; i < 4; ++i) {
        values.push_back(NAN);
        wanted.push_back(NAN);
    }
    const auto rows = static_cast<std::int64_t>(values.size() / 4);
    Cache cache(type, rows, 1, 1, 4, 4);
    Buffer<float> k(rows * 4);
    std::memcpy(k.data(), values.data(), values.size() * sizeof(float));
    Buffer<std::int64_t> slots(rows);
    for (std::int64_t i = 0; i < rows; ++i) slots[i] = i;
    write(cache, k, k, 4, 4, slots);
    for (std::int64_t i = 0; i < rows * 4; ++i) {
        check_close("key", i, cache.key(i / 4, 0, i % 4), wanted[static_cast<std::size_t>(i)], 0, 0);
        check_close("value", i, cache.value(i / 4, 0, i % 4), wanted[static_cast<std::size_t>(i)], 0, 0);
    }
}

TEST(write_rounded) {
    check_rounding(CacheType::fp8_e4m3, 126, [](int code) { return fp8_value(static_cast<std::uint8_t>(code)); });
    check_rounding(CacheType::float16, 0x7bff, [](int code) {
        const std::uint8_t bytes[] = {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(code >> 8)};
        return half_value(bytes);
    });
}

struct Request {
    std::int64_t queries, length;
};

struct AttentionCase {
    CacheType type;
    std::vector<Request> requests;
    std::int64_t q_heads, k_heads, head_dim, block_size, window;
    float softcap;
    bool sinks;
    std::int64_t values = 0, chunk = 0;  // values: their width, if not that of keys
    std::vector<std::int32_t> prompt_lens = {};  // one a request, or none
    bool slopes = false, one_cache = false;

    std::int64_t value_dim() const { return values ? values : head_dim; }
};

// A step over a cache of random keys: each request's positions lie in blocks of its own, in random order.
template <class T>
struct Step {
    AttentionCase c;
    std::int64_t rows = 0, table_width = 1, blocks = 1, q_stride;
    Buffer<std::int32_t> table, starts, lengths;
    Cache cache;
    Buffer<T> q;
    Buffer<float> sinks, slopes;

    static std::int64_t count_rows(const AttentionCase& c) {
        std::int64_t rows = 0;
        for (const Request& r : c.requests) rows += r.queries;
        return rows;
    }
    static std::int64_t blocks_of(const AttentionCase& c, const Request& r) { return (r.length + c.block_size - 1) / c.block_size; }
    static std::int64_t widest(const AttentionCase& c) {
        std::int64_t width = 1;
        for (const Request& r : c.requests) width = std::max(width, blocks_of(c, r));
        return width;
    }
    static std::int64_t count_blocks(const AttentionCase& c) {
        std::int64_t count = 1;
        for (const Request& r : c.requests) count += blocks_of(c, r);
        return count;
    }

    Step(Random& random, const AttentionCase& c)
        : c(c), rows(count_rows(c)), table_width(widest(c)), blocks(count_blocks(c)), q_stride(c.q_heads * c.head_dim + 3),
          table(static_cast<std::int64_t>(c.requests.size()) * table_width), starts(static_cast<std::int64_t>(c.requests.size()) + 1),
          lengths(static_cast<std::int64_t>(c.requests.size())), cache(c.type, blocks, c.block_size, c.k_heads, c.head_dim, c.value_dim(), c.one_cache),
          q(random_buffer<T>(random, (rows - 1) * q_stride + c.q_heads * c.head_dim, 3)),
          sinks(random_buffer<float>(random, c.q_heads, 2)), slopes(random_buffer<float>(random, c.q_heads, 0.3f)) {
        std::vector<std::int32_t> free_blocks;
        for (std::int64_t i = 1; i < blocks; ++i) free_blocks.push_back(static_cast<std::int32_t>(i));
        for (std::int64_t b = 0; b < lengths.size(); ++b) {
            const Request& r = c.requests[static_cast<std::size_t>(b)];
            lengths[b] = static_cast<std::int32_t>(r.length);
            starts[b + 1] = static_cast<std::int32_t>(starts[b] + r.queries);
            for (std::int64_t i = 0; i < table_width; ++i) {
                table[b * table_width + i] = -1;
                if (i >= blocks_of(c, r)) continue;
                const auto pick = random.below(static_cast<std::int64_t>(free_blocks.size()));
                table[b * table_width + i] = free_blocks[static_cast<std::size_t>(pick)];
                free_blocks.erase(free_blocks.begin() + pick);
            }
            Buffer<std::int64_t> slots(r.length);
            for (std::int64_t p = 0; p < r.length; ++p) slots[p] = slot(b, p);
            const std::int64_t key = c.k_heads * c.head_dim, value = c.k_heads * c.value_dim();
            write(cache, random_buffer<float>(random, r.length * key), random_buffer<float>(random, r.length * value), key, value, slots);
        }
    }

    std::int64_t slot(std::int64_t b, std::int64_t p) const {
        return table[b * table_width + p / c.block_size] * c.block_size + p % c.block_size;
    }

    // Requests [first, last) of the step.
    Buffer<T> run(std::int64_t first, std::int64_t last) {
        const std::int64_t begin = starts[first], count = starts[last] - begin;
        Buffer<std::int32_t> own_starts(last - first + 1);
        for (std::int64_t b = first; b <= last; ++b) own_starts[b - first] = static_cast<std::int32_t>(starts[b] - begin);
        Buffer<T> out = filled<T>(count * c.q_heads * c.value_dim(), 77);
        AttentionPlan plan;
        plan.make({table.data() + first * table_width, own_starts.data(), lengths.data() + first,
                   c.prompt_lens.empty() ? nullptr : c.prompt_lens.data() + first, count, last - first, table_width, c.q_heads, c.k_heads,
                   c.head_dim, c.value_dim(), blocks, c.block_size, c.window, c.chunk});
        paged_attention(
            {q.data() + begin * q_stride, dtype_of<T>, q_stride, cache.view(c.one_cache ? cache.v : cache.k), cache.view(cache.v), c.type,
             cache.view(cache.k_scale), cache.view(cache.v_scale), c.sinks ? sinks.data() : nullptr, c.slopes ? slopes.data() : nullptr,
             out.data(), 0.3f, c.softcap, c.one_cache},
            plan);
        return out;
    }

    std::vector<double> expected(std::int64_t b, std::int64_t query, std::int64_t head) const {
        const Request& r = c.requests[static_cast<std::size_t>(b)];
        const std::int64_t position = r.length - r.queries + query;
        const std::int64_t prompt_len = c.prompt_lens.empty() ? 0 : c.prompt_lens[static_cast<std::size_t>(b)];
        std::vector<std::int64_t> seen;
        for (std::int64_t p = 0; p <= position; ++p) {
            if (c.chunk > 0 && p / c.chunk != position / c.chunk) continue;
            if (c.window == 0 || position - p < c.window || p < prompt_len) seen.push_back(p);
        }
        const std::int64_t key_head = head / (c.q_heads / c.k_heads);
        const T* row = q.data() + (starts[b] + query) * q_stride + head * c.head_dim;
        std::vector<double> scores, sums(static_cast<std::size_t>(c.value_dim()));
        double highest = c.sinks ? sinks[head] : -INFINITY;
        for (const std::int64_t p : seen) {
            double score = 0;
            for (std::int64_t d = 0; d < c.head_dim; ++d) score += to_float(row[d]) * cache.key(slot(b, p), key_head, d);
            score *= 0.3f;
            if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
            if (c.slopes) score += slopes[head] * static_cast<double>(p - position);
            scores.push_back(score);
            highest = std::max(highest, score);
        }
        double total = c.sinks ? std::exp(sinks[head] - highest) : 0;
        for (std::size_t i = 0; i < seen.size(); ++i) {
            const double weight = std::exp(scores[i] - highest);
            total += weight;
            for (std::int64_t d = 0; d < c.value_dim(); ++d) {
                sums[static_cast<std::size_t>(d)] += weight * cache.value(slot(b, seen[i]), key_head, d);
            }
        }
        for (double& sum : sums) sum /= total;
        return sums;
    }
};

template <class T>
void check_attention(Random& random, const AttentionCase& c) {
    Step<T> step(random, c);
    const auto count = static_cast<std::int64_t>(c.requests.size());
    const Buffer<T> out = step.run(0, count);
    for (std::int64_t b = 0; b < count; ++b) {
        const std::int64_t queries = c.requests[static_cast<std::size_t>(b)].queries;
        for (std::int64_t i = 0; i < queries; ++i) {
            for (std::int64_t h = 0; h < c.q_heads; ++h) {
                const std::vector<double> expected = step.expected(b, i, h);
                for (std::int64_t d = 0; d < c.value_dim(); ++d) {
                    const std::int64_t at = ((step.starts[b] + i) * c.q_heads + h) * c.value_dim() + d;
                    check_close("attention", at, to_float(out[at]), expected[static_cast<std::size_t>(d)], relative_of<T>(64), 2e-5);
                }
            }
        }
        const Buffer<T> alone = step.run(b, b + 1);
        check_same_bits("a request alone", alone.data(), out.data() + step.starts[b] * c.q_heads * c.value_dim(), alone.size());
    }
}

TEST(attention) {
    Random random(11);
    const std::vector<Request> requests = {{1, 1}, {3, 3}, {1, 40}, {17, 23}, {2, 33}};
    for (const CacheType type : kCacheTypes) {
        for (const std::int64_t head_dim : {4, 12, 20, 64, 68}) {
            for (const std::int64_t block_size : {1, 3, 16}) {
                const std::int64_t window = block_size == 3 ? 5 : 0;
                check_attention<float>(random, {type, requests, 6, 2, head_dim, block_size, window, block_size == 1 ? 5.0f : 0.0f, false});
                check_attention<bf16>(random, {type, requests, 3, 3, head_dim, block_size, window, 0, true});
            }
        }
    }
}

// Longer than a span, on one thread and on several.
TEST(attention_over_spans) {
    Random random(12);
    for (const CacheType type : kCacheTypes) {
        for_threads([&] {
            check_attention<float>(random, {type, {{1, kSpan}, {1, kSpan + 1}, {2, 2 * kSpan + 37}, {1, 5}}, 4, 1, 32, 16, 0, 0, true});
            check_attention<bf16>(random, {type, {{5, kSpan + 3}, {1, 2 * kSpan}}, 2, 2, 64, 16, kSpan / 2 + 7, 0, false});
        });
    }
}

// What a query sees other than all before it or a window; keys and values of different widths.
TEST(attention_sights) {
    Random random(15);
    const std::vector<Request> requests = {{1, 1}, {7, 2 * kSpan + 4}, {1, 400}, {12, 12}, {3, kSpan + 1}};
    for (const CacheType type : kCacheTypes) {
        for_threads([&] {
            AttentionCase chunks{type, requests, 4, 2, 20, 16, 0, 0, false};
            chunks.chunk = 100;
            check_attention<float>(random, chunks);
            AttentionCase prompt_lens{type, requests, 3, 1, 20, 3, 30, 0, true};
            prompt_lens.prompt_lens = {1, kSpan * 2, 256, 9, 400};
            prompt_lens.values = 12;
            check_attention<float>(random, prompt_lens);
            check_attention<bf16>(random, prompt_lens);
            AttentionCase slopes{type, requests, 6, 2, 16, 16, 0, 0, false};
            slopes.slopes = true;
            slopes.values = 36;
            check_attention<float>(random, slopes);
        });
    }
}

// Keys that lie as values do and begin with them: any number of heads, any width, blocks that a register of keys leaves.
TEST(attention_over_one_cache) {
    Random random(16);
    const std::vector<Request> requests = {{1, 1}, {7, 2 * kSpan + 4}, {1, 300}, {12, 12}};
    for (const CacheType type : kCacheTypes) {
        if (type == CacheType::int8) continue;
        for_threads([&] {
            for (const std::int64_t group : {1, 3, 7, 33}) {
                for (const std::int64_t width : {0, 3, 17}) {
                    AttentionCase c{type, requests, group, 1, 32 + width, width ? 5 : 16, 0, 0, width == 3};
                    c.values = width == 3 ? 32 : 20 + width;
                    c.one_cache = true;
                    check_attention<float>(random, c);
                    if (group == 3) check_attention<bf16>(random, c);
                }
            }
            AttentionCase heads{type, requests, 6, 2, 36, 3, 40, 5.0f, false};
            heads.values = 36;
            heads.one_cache = true;
            check_attention<float>(random, heads);
        });
    }
}

// Requests of any number of queries, and so tiles of any size, have the bits that they have alone, on any threads.
TEST(attention_of_any_shape) {
    Random random(14);
    for (int i = 0; i < 60; ++i) {
        const CacheType type = kCacheTypes[random.below(5)];
        const std::int64_t group = random.below(12) ? 1 + random.below(9) : 30 + random.below(240);
        const std::int64_t key_heads = group > 9 ? 1 : 1 + random.below(2);
        const std::int64_t head_dim = 4 * (1 + random.below(random.below(3) ? 16 : 40));
        const std::int64_t window = random.below(2) ? 0 : 1 + random.below(300);
        std::vector<Request> requests;
        for (std::int64_t left = 1 + random.below(4); left > 0; --left) {
            const std::int64_t queries = group > 9 ? 1 + random.below(3) : 1 + random.below(2) * random.below(90);
            requests.push_back({queries, queries + random.below(random.below(3) ? 60 : 2 * kSpan)});
        }
        const std::int64_t block_sizes[] = {1, 3, 8, 16, 32}, block_size = block_sizes[random.below(5)];
        Step<float> step(random, {type, requests, group * key_heads, key_heads, head_dim, block_size, window,
                                  random.below(4) ? 0.0f : 5.0f, random.below(2) == 0, 4 * (1 + random.below(20)),
                                  random.below(3) ? 0 : 1 + random.below(400)});
        const auto count = static_cast<std::int64_t>(requests.size());
        use_threads(1 + static_cast<int>(random.below(3)));
        const Buffer<float> all = step.run(0, count);
        for (std::int64_t j = 0; j < all.size(); ++j) CHECK(std::isfinite(all[j]));
        for (std::int64_t b = 0; b < count; ++b) {
            use_threads(1 + static_cast<int>(random.below(3)));
            const Buffer<float> alone = step.run(b, b + 1);
            const std::int64_t row = group * key_heads * step.c.value_dim();
            check_same_bits("a request alone", alone.data(), all.data() + step.starts[b] * row, alone.size());
        }
    }
    use_threads(1);
}

// A step's scratch is as large as its largest tile needs; no smaller tile may need more.
TEST(attention_scratch) {
    std::vector<const AttentionKernels*> tables = {&kScalarAttention};
    const auto isas = supported_isas();
    const auto has = [&](const char* name) { return std::find(isas.begin(), isas.end(), name) != isas.end(); };
#if defined(CANTER_X86)
    if (has("avx2")) tables.push_back(&kAvx2Attention);
    if (has("avx512")) tables.push_back(&kAvx512Attention);
#elif defined(CANTER_ARM)
    if (has("neon")) tables.push_back(&kNeonAttention);
#endif
    AttentionStep step{};
    for (const std::int64_t head_dim : {4, 20, 64, 256}) {
        step.head_dim = head_dim;
        step.value_dim = 68;
        for (const AttentionKernels* k : tables) {
            for (std::int64_t rows = 1; rows < 200; ++rows) CHECK(k->scratch(step, rows) <= k->scratch(step, rows + 1));
        }
    }
}

TEST(attention_refusals) {
    Random random(13);
    Step<float> step(random, {CacheType::float32, {{2, 9}}, 2, 1, 8, 4, 0, 0, false});
    step.table[2] = static_cast<std::int32_t>(step.blocks);
    check_throws<std::out_of_range>("a block beyond the cache", [&] { step.run(0, 1); });
    step.table[2] = 1;
    step.lengths[0] = 13;
    check_throws<std::out_of_range>("a length beyond the table", [&] { step.run(0, 1); });
    step.lengths[0] = 9;
    step.c.window = 2;
    step.table[0] = -1;
    step.run(0, 1);
    step.c.prompt_lens = {1};
    check_throws<std::out_of_range>("a block of the prompt_len that is not there", [&] { step.run(0, 1); });
    step.c.prompt_lens = {-1};
    check_throws<std::out_of_range>("a prompt_len below zero", [&] { step.run(0, 1); });
    step.lengths[0] = 1;
    check_throws<std::out_of_range>("fewer positions than queries", [&] { step.run(0, 1); });
}

}  // namespace
}  // namespace canter::test
