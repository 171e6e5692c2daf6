// Attention over a paged cache, and writing to it.
//
// A query row walks over key positions in tiles of kKeyTile positions, aligned at position 0 whatever the block size,
// with an online softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867): within a tile, maximum, then weights, then
// values in order of position. The order depends on the query's position and window alone, so a row has the same bits
// alone, in a chunk of any length, and in any batch.
#pragma once

#include <cstdint>

#include "common.h"

namespace canter {

inline constexpr std::int64_t kKeyTile = 16;
inline constexpr std::int64_t kQueryTile = 16;  // most tokens of one request that a task works on

struct CacheView {
    void* data;  // [NB, Hk, BS, D]; blocks `block_stride` elements apart
    std::int64_t block_stride;
};

struct WriteKVArgs {
    const void *k, *v;  // [T, Hk, D]: heads lie next to each other, tokens k_stride, v_stride elements apart
    DType type;
    std::int64_t k_stride, v_stride;
    CacheView k_cache, v_cache;
    DType cache_type;
    const std::int64_t* slots;  // [T]
    std::int64_t rows, heads, head_dim, num_blocks, block_size;
};

// Throws std::out_of_range for a slot that is neither -1 nor in the cache.
void write_kv(const WriteKVArgs& args);

struct AttentionArgs {
    const void* q;  // [T, Hq, D], tokens q_stride elements apart
    DType type;
    std::int64_t q_stride;
    CacheView k_cache, v_cache;
    DType cache_type;
    const std::int32_t* block_table;  // [B, MB]
    const std::int32_t* query_start_loc;  // [B + 1]
    const std::int32_t* seq_lens;  // [B]
    void* out;  // [T, Hq, D]
    std::int64_t rows, requests, table_width, q_heads, k_heads, head_dim, num_blocks, block_size, window;
    float scale, softcap;
};

// Tokens [begin, end) of a request (rows of q) under query heads [head_begin, head_end), which share one key head.
struct AttentionTile {
    std::int64_t request, begin, end, head_begin, head_end;
};

// Floats of scratch that a tile of `rows` queries (tokens times heads) needs.
inline constexpr std::int64_t attention_scratch(std::int64_t rows, std::int64_t head_dim) {
    return rows * (2 * head_dim + kKeyTile + 2) + 2 * kKeyTile * head_dim;
}

// Throws std::out_of_range when lengths, block table and cache do not fit together.
void paged_attention(const AttentionArgs& args);

}  // namespace canter
