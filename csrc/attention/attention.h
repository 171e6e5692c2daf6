// Attention over a paged cache, and writing to it.
//
// A block of keys is [Hk, D / x, BS, x] with x elements in 4 bytes, but 1 for float16, which instructions widen as it lies:
// neighbouring lanes of a register are neighbouring keys, so scores need no sums across lanes. A block of values is [Hk, BS, Dv],
// as wide as keys or not. A layer whose values are the first Dv elements of its keys (multi-head latent attention) may keep one cache
// for both: its keys lie as values do, [Hk, BS, D].
//
// The keys of a request are cut into spans of kSpan positions, aligned at position 0 whatever the block size. Within a span a
// query row finds all scores (one chain of multiply-adds per key, in order of d), their maximum, the weights, and adds up the
// values in order of position; spans are merged in ascending order with a running maximum (Milakov and Gimelshein, 2018,
// arXiv:1805.02867). All of it depends on the query's position and what it sees alone, so a row has the same bits alone, in a chunk
// of any length, in any batch, and with the spans of a long context spread over any number of threads.
//
// What a query sees is one run of keys that ends with its own: all, those of a window, those of its chunk. Where a
// request's prompt stays in sight whatever the window, it is two: the prompt's keys, and those behind it. The spans of the first
// come first, and a span that holds the prompt's end is worked on twice, once for each.
#pragma once

#include <cstdint>

#include "common.h"

namespace canter {

inline constexpr std::int64_t kSpan = 256;
inline constexpr std::int64_t kPanel = 32;  // keys whose scores are computed together

enum class CacheType : int { float32 = 0, bfloat16 = 1, fp8_e4m3 = 2, int8 = 3, float16 = 4 };

inline constexpr std::int64_t cache_bytes(CacheType type) {
    return type == CacheType::float32 ? 4 : type == CacheType::bfloat16 || type == CacheType::float16 ? 2 : 1;
}

struct f16 {
    std::uint16_t bits;
};

struct CacheView {
    void* data;
    std::int64_t block_bytes;  // from one block to the next
};

// Scales of int8 keys or values: [Hk, BS] a block, blocks `block_stride` floats apart.
struct ScaleView {
    float* data;
    std::int64_t block_stride;
};

struct WriteKVArgs {
    const void *k, *v;  // [T, Hk, D], [T, Hk, Dv]: heads lie next to each other, tokens k_stride, v_stride elements apart
    DType type;
    std::int64_t k_stride, v_stride;
    CacheView k_cache, v_cache;
    CacheType cache_type;
    ScaleView k_scale, v_scale;  // int8 only
    const std::int64_t* slots;  // [T]
    std::int64_t rows, heads, head_dim, value_dim, num_blocks, block_size;
};

// Throws std::out_of_range for a slot that is neither -1 nor in the cache.
void write_kv(const WriteKVArgs& args);

// What a step asks of the layers of one state group.
struct AttentionStep {
    const std::int32_t* block_table;  // [B, MB]
    const std::int32_t* query_start_loc;  // [B + 1]
    const std::int32_t* seq_lens;  // [B]
    const std::int32_t* prompt_lens;  // [B] or null: positions below stay in sight, whatever the window
    std::int64_t rows, requests, table_width, q_heads, k_heads, head_dim, value_dim, num_blocks, block_size;
    std::int64_t window, chunk;  // 0: none

    // The first position that a query sees; behind the prompt, where that stays in sight.
    std::int64_t sight_begin(std::int64_t position, std::int64_t prompt_len) const {
        std::int64_t begin = prompt_len;
        if (window > 0 && position - window + 1 > begin) begin = position - window + 1;
        if (chunk > 0 && position / chunk * chunk > begin) begin = position / chunk * chunk;
        return begin;
    }
    std::int64_t prompt_len(std::int64_t request) const { return prompt_lens ? prompt_lens[request] : 0; }
};

struct AttentionArgs {
    const void* q;  // [T, Hq, D], tokens q_stride elements apart
    DType type;
    std::int64_t q_stride;
    CacheView k_cache, v_cache;
    CacheType cache_type;
    ScaleView k_scale, v_scale;  // int8 only
    const float* sinks;  // [Hq] or null: the score of a further key without a value
    const float* slopes;  // [Hq] or null: what a score loses for each position that the key lies before the query
    void* out;  // [T, Hq, Dv]
    float scale, softcap;
    bool one_cache = false;  // v_cache holds the keys too: rows of D, whose first Dv elements are the values; not for int8
};

// Tokens [begin, end) of a request (rows of q) under query heads [head_begin, head_end), which share one key head, and the
// spans that any of them sees: from the first of these, those of the prompt where it stays in sight, then, from the request's span
// `first_span` on, those of other keys. Its rows are tokens times heads, heads innermost.
struct AttentionTile {
    std::int64_t request, begin, end, head_begin, head_end, span_begin, span_end, prompt_spans, first_span;

    bool in_prompt(std::int64_t span) const { return span < prompt_spans; }
    // Which span of the request's that is.
    std::int64_t at(std::int64_t span) const { return in_prompt(span) ? span : span - prompt_spans + first_span; }
    std::int64_t rows() const { return (end - begin) * (head_end - head_begin); }
};

// Floats that a span leaves behind for `rows` rows: sums of values, maxima, totals.
inline constexpr std::int64_t partial_floats(std::int64_t rows, std::int64_t value_dim) { return rows * (value_dim + 2); }

// Throws std::out_of_range where lengths, block table and cache do not fit together.
class AttentionPlan;
void paged_attention(const AttentionArgs& args, AttentionPlan& plan);

}  // namespace canter
