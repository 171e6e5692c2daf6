#include "attention/attention.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa/dispatch.h"
#include "parallel/rows.h"

namespace canter {
namespace {

std::int64_t num_queries(const AttentionArgs& a, std::int64_t b) { return a.query_start_loc[b + 1] - a.query_start_loc[b]; }

[[noreturn]] void refuse(std::int64_t request, const std::string& why) {
    throw std::out_of_range("paged_attention: request " + std::to_string(request) + ": " + why);
}

// Blocks that a request reads must exist; those behind its window may be anything.
void check_request(const AttentionArgs& a, std::int64_t b) {
    const std::int64_t queries = num_queries(a, b), length = a.seq_lens[b];
    if (a.query_start_loc[b] < 0 || queries < 0 || a.query_start_loc[b + 1] > a.rows) refuse(b, "query_start_loc does not fit the queries.");
    if (queries == 0) return;
    if (length < queries || length > a.table_width * a.block_size) {
        refuse(b, std::to_string(length) + " positions do not fit " + std::to_string(queries) + " queries and a table of " +
                      std::to_string(a.table_width) + " blocks.");
    }
    const std::int64_t first = a.window > 0 ? std::max<std::int64_t>(0, length - queries - a.window + 1) : 0;
    const std::int32_t* table = a.block_table + b * a.table_width;
    for (std::int64_t i = first / a.block_size; i <= (length - 1) / a.block_size; ++i) {
        if (table[i] < 0 || table[i] >= a.num_blocks) refuse(b, "block " + std::to_string(table[i]) + " is not in the cache.");
    }
}

// Cut requests into tiles: runs of tokens under one key head, its query heads apart where threads would idle.
std::vector<AttentionTile> make_tiles(const AttentionArgs& a) {
    const std::int64_t group = a.q_heads / a.k_heads;
    std::int64_t whole = 0;
    for (std::int64_t b = 0; b < a.requests; ++b) whole += (num_queries(a, b) + kQueryTile - 1) / kQueryTile * a.k_heads;
    std::int64_t heads = group;
    while (heads > 1 && whole * ((group + heads - 1) / heads) < 2 * num_threads()) heads = (heads + 1) / 2;
    std::vector<AttentionTile> tiles;
    tiles.reserve(static_cast<std::size_t>(whole * ((group + heads - 1) / heads)));
    for (std::int64_t b = 0; b < a.requests; ++b) {
        // Late tiles see the most keys: first, so that none is left to run alone at the end.
        const std::int64_t start = a.query_start_loc[b], count = (num_queries(a, b) + kQueryTile - 1) / kQueryTile;
        for (std::int64_t i = count - 1; i >= 0; --i) {
            const std::int64_t begin = start + i * kQueryTile, end = std::min<std::int64_t>(begin + kQueryTile, a.query_start_loc[b + 1]);
            for (std::int64_t h = 0; h < a.q_heads; h += group) {
                for (std::int64_t at = h; at < h + group; at += heads) tiles.push_back({b, begin, end, at, std::min(at + heads, h + group)});
            }
        }
    }
    return tiles;
}

// Query-key pairs of the step, times their arithmetic: what decides whether threads pay.
std::int64_t count_work(const AttentionArgs& a) {
    std::int64_t work = 0;
    for (std::int64_t b = 0; b < a.requests; ++b) {
        const std::int64_t length = a.window > 0 ? std::min(a.window, static_cast<std::int64_t>(a.seq_lens[b])) : a.seq_lens[b];
        work += num_queries(a, b) * length * a.q_heads * a.head_dim * 2;
    }
    return work;
}

}  // namespace

void write_kv(const WriteKVArgs& args) {
    const std::int64_t slots = args.num_blocks * args.block_size;
    for (std::int64_t i = 0; i < args.rows; ++i) {
        if (args.slots[i] < -1 || args.slots[i] >= slots) {
            throw std::out_of_range("write_kv: slots must be -1 or in [0, " + std::to_string(slots) + "), got " + std::to_string(args.slots[i]) + ".");
        }
    }
    const KernelTable& k = kernels();
    for_rows(args.rows, 2 * args.heads * args.head_dim, [&](std::int64_t begin, std::int64_t end) { k.write_kv(args, begin, end); });
}

void paged_attention(const AttentionArgs& args) {
    std::int64_t covered = 0;
    for (std::int64_t b = 0; b < args.requests; ++b) {
        check_request(args, b);
        covered = args.query_start_loc[b + 1];
    }
    const std::int64_t row_bytes = args.q_heads * args.head_dim * dtype_bytes(args.type);
    std::memset(static_cast<char*>(args.out) + covered * row_bytes, 0, static_cast<std::size_t>((args.rows - covered) * row_bytes));
    const std::vector<AttentionTile> tiles = make_tiles(args);
    const KernelTable& k = kernels();
    const auto run = [&](std::int64_t i) {
        const AttentionTile& tile = tiles[static_cast<std::size_t>(i)];
        const std::int64_t rows = (tile.end - tile.begin) * (tile.head_end - tile.head_begin);
        k.attention(args, tile, scratch_floats(Scratch::task, static_cast<std::size_t>(attention_scratch(rows, args.head_dim))));
    };
    const auto count = static_cast<std::int64_t>(tiles.size());
    if (count_work(args) < 1 << 15) {
        for (std::int64_t i = 0; i < count; ++i) run(i);
    } else {
        parallel_for(count, run);
    }
}

}  // namespace canter
