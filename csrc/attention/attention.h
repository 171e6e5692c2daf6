// Attention over a paged cache, and writing to it.
//
// A block of keys is [Hk, D / x, BS, x] with x elements in 4 bytes: neighbouring lanes of a register are neighbouring keys,
// so scores need no sums across lanes. A block of values is [Hk, BS, D].
//
// The keys of a request are cut into spans of kSpan positions, aligned at position 0 whatever the block size. Within a span a
// query row finds all scores (one chain of multiply-adds per key, in order of d), their maximum, the weights, and adds up the
// values in order of position; spans are merged in ascending order with a running maximum (Milakov and Gimelshein, 2018,
// arXiv:1805.02867). All of it depends on the query's position and window alone, so a row has the same bits alone, in a chunk
// of any length, in any batch, and with the spans of a long context spread over any number of threads.
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
    const void *k, *v;  // [T, Hk, D]: heads lie next to each other, tokens k_stride, v_stride elements apart
    DType type;
    std::int64_t k_stride, v_stride;
    CacheView k_cache, v_cache;
    CacheType cache_type;
    ScaleView k_scale, v_scale;  // int8 only
    const std::int64_t* slots;  // [T]
    std::int64_t rows, heads, head_dim, num_blocks, block_size;
};

// Throws std::out_of_range for a slot that is neither -1 nor in the cache.
void write_kv(const WriteKVArgs& args);

// What a step asks of the layers of one state group.
struct AttentionStep {
    const std::int32_t* block_table;  // [B, MB]
    const std::int32_t* query_start_loc;  // [B + 1]
    const std::int32_t* seq_lens;  // [B]
    std::int64_t rows, requests, table_width, q_heads, k_heads, head_dim, num_blocks, block_size, window;
};

struct AttentionArgs {
    const void* q;  // [T, Hq, D], tokens q_stride elements apart
    DType type;
    std::int64_t q_stride;
    CacheView k_cache, v_cache;
    CacheType cache_type;
    ScaleView k_scale, v_scale;  // int8 only
    const float* sinks;  // [Hq] or null: the score of a further key without a value
    void* out;  // [T, Hq, D]
    float scale, softcap;
};

// Tokens [begin, end) of a request (rows of q) under query heads [head_begin, head_end), which share one key head, and the
// spans that any of them sees. Its rows are tokens times heads, heads innermost.
struct AttentionTile {
    std::int64_t request, begin, end, head_begin, head_end, span_begin, span_end;

    std::int64_t rows() const { return (end - begin) * (head_end - head_begin); }
};

// Floats that a span leaves behind for `rows` rows: sums of values, maxima, totals.
inline constexpr std::int64_t partial_floats(std::int64_t rows, std::int64_t head_dim) { return rows * (head_dim + 2); }

// Throws std::out_of_range where lengths, block table and cache do not fit together.
class AttentionPlan;
void paged_attention(const AttentionArgs& args, AttentionPlan& plan);

}  // namespace canter
