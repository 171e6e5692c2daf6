// Choosing tokens from rows of logits [L, V] float32. A row's result depends on that row alone; rows are split over threads.
#pragma once

#include <cstdint>

namespace canter {

// The meaning of truncation, for a row's logits over its temperature in descending order, equal ones by ascending id:
// min-p keeps values of at least peak + log_min_p; top-k keeps those of at least the k-th (ties kept); top-p keeps, of
// what is left, the shortest beginning whose share of the probability is at least top_p, never less than one token.
struct DrawArgs {
    float* logits;  // [L, V]; written by keep only
    const float* temperature;  // [L]; 0: the largest logit, no draw
    const std::int64_t* top_k;  // [L]; V or more: off
    const double* top_p;  // [L]; 1 or more: off
    const float* log_min_p;  // [L]; -inf: off
    const std::int64_t* seed_keys;  // [L]
    const std::int64_t* positions;  // [L]
    const std::int32_t* salts;  // [V]
    float* scores;  // [L]: the largest logit over the temperature, NaN if any is
    std::int64_t* tokens;  // [L]
    std::int64_t rows, vocab;
    std::uint64_t stream_offset;
};

struct GreedyArgs {
    const float* logits;
    float* scores;
    std::int64_t* tokens;
    std::int64_t rows, vocab;
};

struct PenaltyArgs {
    float* logits;
    const std::int64_t* lines;  // [N]: rows of logits
    const std::int64_t* rows;  // [N]: rows of counts
    const std::int32_t* counts;  // [R, V]
    const float* repetition;  // [N]
    const float* frequency;
    const float* presence;
    const std::int64_t* draft_ids;  // [N, D]
    const std::int32_t* draft_counts;  // [N, D]
    std::int64_t count, vocab, drafts;
    std::int32_t in_prompt;  // the bit of counts that says so
};

struct AllowArgs {
    float* logits;
    const std::int64_t* lines;  // [N]: rows of logits, distinct
    const std::int64_t* starts;  // [N + 1]: where the ids of each begin
    const std::int64_t* ids;
    std::int64_t count, rows, vocab;
};

struct MaskArgs {
    float* logits;
    const std::int64_t* lines;  // [N]: rows of logits, distinct
    const std::int32_t* masks;  // [N, ceil(V / 32)]: a bit for each token, the lowest first
    std::int64_t count, rows, vocab;
};

struct AddArgs {
    float* logits;
    const std::int64_t* lines;  // [K]
    const std::int64_t* ids;  // [K]
    const float* values;  // [K]
    std::int64_t count, rows, vocab;
};

// K words, each forbidden where the tokens before a logit end in all of it but its last id.
struct ForbidArgs {
    float* logits;
    const std::int64_t* lines;  // [K]: rows of logits
    const std::int64_t* last;  // [K]: each word's last id
    const std::int64_t* prefixes;  // [K, M]: the ids before it, at the right
    const std::int64_t* lengths;  // [K]: how many
    const std::int64_t* rows;  // [K]: rows of token_ids
    const std::int64_t* first;  // [K]: index among the row's tokens of the first one to compare
    const std::int64_t* drafts;  // [K]: drafts before the logit, which stand in input_ids up to its line
    const std::int32_t* token_ids;  // [R, W]
    const std::int32_t* total_len;  // [R]
    const std::int64_t* input_ids;  // [L]; null: there are no drafts
    std::int64_t count, longest, num_rows, width, num_lines, vocab;
};

struct LogprobArgs {
    const float* logits;
    const std::int64_t* chosen;  // [L]
    std::int64_t* ids;  // [L, 1 + top]
    float* logprobs;  // [L, 1 + top]
    std::int64_t* ranks;  // [L]
    std::int64_t rows, vocab, top;
};

// What an instruction set provides: rows begin to end, on one thread. `scratch` holds sampling_scratch(vocab) floats.
struct SamplingTable {
    void (*greedy)(const GreedyArgs&, std::int64_t begin, std::int64_t end);
    void (*draw)(const DrawArgs&, std::int64_t begin, std::int64_t end, float* scratch);
    void (*keep)(const DrawArgs&, std::int64_t begin, std::int64_t end, float* scratch);
    void (*penalize)(const PenaltyArgs&, std::int64_t begin, std::int64_t end, float* scratch);
    void (*logprobs)(const LogprobArgs&, std::int64_t begin, std::int64_t end, float* scratch);
};

extern const SamplingTable kScalarSampling;
#if defined(CANTER_X86)
extern const SamplingTable kAvx2Sampling;
extern const SamplingTable kAvx512Sampling;
#elif defined(CANTER_ARM)
extern const SamplingTable kNeonSampling;
#endif

inline constexpr std::int64_t kSamplingBlock = 64;  // elements whose maximum is kept
inline constexpr std::int64_t kMaxListed = 4096;  // candidates that are listed and sorted, at most
inline constexpr std::int64_t kRadixBuckets = 2048;
inline constexpr std::int64_t kMaxTop = 1024;  // of LogprobArgs::top

// Block maxima and a copy, the list, the buckets, two rows.
inline constexpr std::int64_t sampling_scratch(std::int64_t vocab) {
    return 2 * (vocab / kSamplingBlock + 16) + 2 * kMaxListed + 2 * kRadixBuckets + 2 * (vocab + 16);
}

void greedy_tokens(const GreedyArgs& args);
void draw_tokens(const DrawArgs& args);
void keep_tokens(const DrawArgs& args);
void penalize(const PenaltyArgs& args);
// These throw std::out_of_range for a line outside [0, L), an id outside [0, V), and tokens that lie outside their table.
void allow_tokens(const AllowArgs& args);
void mask_tokens(const MaskArgs& args);
void add_to_tokens(const AddArgs& args);
void forbid_words(const ForbidArgs& args);
// Throws std::out_of_range for a chosen id outside [0, V).
void token_logprobs(const LogprobArgs& args);

}  // namespace canter
