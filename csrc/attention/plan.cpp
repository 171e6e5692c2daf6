#include "attention/plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "parallel/thread_pool.h"

namespace canter {
namespace {

// Rows of a tile. Many share the conversion of a key; too many and their queries and sums leave the second-level cache.
constexpr std::int64_t kMostRows = 256;
constexpr std::int64_t kFewestRows = 48;
// Tasks a thread, so that the last ones to end leave little idle; and the least work of one, in multiply-adds.
constexpr std::int64_t kTasksPerThread = 6;
constexpr std::int64_t kLeastWork = 1 << 17;
// Reading a key costs as much as so many rows' use of it.
constexpr std::int64_t kKeyCost = 4;

[[noreturn]] void refuse(std::int64_t request, const std::string& why) {
    throw std::out_of_range("paged_attention: request " + std::to_string(request) + ": " + why);
}

std::int64_t num_queries(const AttentionStep& s, std::int64_t b) { return s.query_start_loc[b + 1] - s.query_start_loc[b]; }

// Blocks that a request reads must exist; those out of sight may be anything.
void check_request(const AttentionStep& s, std::int64_t b) {
    const std::int64_t queries = num_queries(s, b), length = s.seq_lens[b];
    if (s.query_start_loc[b] < 0 || queries < 0 || s.query_start_loc[b + 1] > s.rows) {
        refuse(b, "query_start_loc does not fit the queries.");
    }
    if (queries == 0) return;
    if (length < queries || length > s.table_width * s.block_size) {
        refuse(b, std::to_string(length) + " positions do not fit " + std::to_string(queries) + " queries and a table of " +
                      std::to_string(s.table_width) + " blocks.");
    }
    const std::int32_t* table = s.block_table + b * s.table_width;
    const auto check_blocks = [&](std::int64_t begin, std::int64_t end) {  // of positions
        for (std::int64_t i = begin / s.block_size; i * s.block_size < end; ++i) {
            if (table[i] < 0 || table[i] >= s.num_blocks) refuse(b, "block " + std::to_string(table[i]) + " is not in the cache.");
        }
    };
    const std::int64_t prompt_len = s.prompt_len(b);
    if (prompt_len < 0) refuse(b, "a prompt of " + std::to_string(prompt_len) + " positions.");
    check_blocks(0, std::min(prompt_len, length));
    check_blocks(s.sight_begin(length - queries, prompt_len), length);
}

// Query-key pairs of a request's queries; an upper bound where chunks have windows.
std::int64_t count_pairs(const AttentionStep& s, std::int64_t b) {
    const auto triangle = [](std::int64_t n) { return n * (n + 1) / 2; };
    const std::int64_t length = s.seq_lens[b], first = length - num_queries(s, b);
    const std::int64_t seen = s.window > 0 ? s.prompt_len(b) + s.window : length;
    const auto in_window = [&](std::int64_t n) { return n <= seen ? triangle(n) : triangle(seen) + (n - seen) * seen; };
    const std::int64_t pairs = in_window(length) - in_window(first);
    if (s.chunk <= 0) return pairs;
    const auto in_chunk = [&](std::int64_t n) { return n / s.chunk * triangle(s.chunk) + triangle(n % s.chunk); };
    return std::min(pairs, in_chunk(length) - in_chunk(first));
}

// Keys that any of a request's queries sees.
std::int64_t count_keys(const AttentionStep& s, std::int64_t b) {
    const std::int64_t length = s.seq_lens[b], prompt_len = s.prompt_len(b);
    return std::min(length, prompt_len) + std::max<std::int64_t>(0, length - s.sight_begin(length - num_queries(s, b), prompt_len));
}

std::int64_t task_cost(const AttentionTile& t) { return (t.span_end - t.span_begin) * (t.rows() + kKeyCost); }

}  // namespace

void AttentionPlan::add_tile(const AttentionTile& tile, std::int64_t target) {
    max_rows_ = std::max(max_rows_, tile.rows());
    const std::int64_t spans = tile.span_end - tile.span_begin;
    const std::int64_t each = std::max<std::int64_t>(1, target / ((tile.rows() + kKeyCost) * kSpan * (step_.head_dim + step_.value_dim)));
    if (spans <= each + each / 2) {
        tasks_.push_back({tile, -1, -1});
        return;
    }
    const std::int64_t parts = (spans + each - 1) / each;
    const auto whole = static_cast<std::int64_t>(shared_.size());
    shared_.push_back({tile, partial_floats_, parts});
    for (std::int64_t i = 0; i < parts; ++i) {
        AttentionTile part = tile;
        part.span_begin = tile.span_begin + spans * i / parts;
        part.span_end = tile.span_begin + spans * (i + 1) / parts;
        tasks_.push_back({part, partial_floats_, whole});
    }
    partial_floats_ += spans * canter::partial_floats(tile.rows(), step_.value_dim);
}

void AttentionPlan::add_request(std::int64_t request, std::int64_t most_tokens, std::int64_t target) {
    const std::int64_t group = step_.q_heads / step_.k_heads, heads = std::min(group, kMostRows);
    const std::int64_t start = step_.query_start_loc[request], end = step_.query_start_loc[request + 1];
    const std::int64_t origin = step_.seq_lens[request] - end;  // position of row 0, were it this request's
    for (std::int64_t begin = start; begin < end; begin += most_tokens) {
        const std::int64_t stop = std::min(begin + most_tokens, end);
        const std::int64_t prompt_len = step_.prompt_len(request), last = origin + stop;  // behind the positions of these tokens
        const std::int64_t prompt_spans = (std::min(prompt_len, last) + kSpan - 1) / kSpan;
        const std::int64_t first_span = step_.sight_begin(origin + begin, prompt_len) / kSpan;
        const std::int64_t other_spans = last > prompt_len ? (last + kSpan - 1) / kSpan - first_span : 0;
        AttentionTile tile{request, begin, stop, 0, 0, 0, prompt_spans + other_spans, prompt_spans, first_span};
        for (std::int64_t h = 0; h < step_.q_heads; h += group) {
            for (std::int64_t at = h; at < h + group; at += heads) {
                tile.head_begin = at;
                tile.head_end = std::min(at + heads, h + group);
                add_tile(tile, target);
            }
        }
    }
}

void AttentionPlan::make(const AttentionStep& step) {
    step_ = step;
    tasks_.clear();
    shared_.clear();
    covered_ = max_rows_ = partial_floats_ = 0;
    std::int64_t pairs = 0, keys = 0;
    for (std::int64_t b = 0; b < step.requests; ++b) {
        check_request(step, b);
        covered_ = step.query_start_loc[b + 1];
        if (num_queries(step, b) == 0) continue;
        pairs += count_pairs(step, b);
        keys += count_keys(step, b);
    }
    const std::int64_t group = step.q_heads / step.k_heads, threads = num_threads(), width = step.head_dim + step.value_dim;
    work_ = pairs * step.q_heads * width;
    const std::int64_t all = work_ + keys * kKeyCost * step.k_heads * width;
    // One thread gains nothing from small tasks; several need enough of them to share the work evenly.
    const std::int64_t target = threads == 1 ? INT64_MAX : std::max(kLeastWork, all / (threads * kTasksPerThread));
    for (std::int64_t b = 0; b < step.requests; ++b) {
        const std::int64_t queries = num_queries(step, b);
        if (queries == 0) continue;
        const std::int64_t per_token = std::max<std::int64_t>(1, count_pairs(step, b) / queries * group * width);
        const std::int64_t most_rows = std::max<std::int64_t>(1, kMostRows / group);
        const std::int64_t fewest_rows = std::max<std::int64_t>(1, kFewestRows / group);
        add_request(b, std::clamp(target / per_token, fewest_rows, most_rows), target);
    }
    if (threads > 1) {
        std::stable_sort(tasks_.begin(), tasks_.end(),
                         [](const AttentionTask& a, const AttentionTask& b) { return task_cost(a.tile) > task_cost(b.tile); });
    }
    if (shared_.size() > left_size_) {
        left_size_ = 2 * shared_.size();
        left_ = std::make_unique<std::atomic<std::int64_t>[]>(left_size_);
    }
    for (std::size_t i = 0; i < shared_.size(); ++i) left_[i].store(shared_[i].tasks, std::memory_order_relaxed);
}

}  // namespace canter
