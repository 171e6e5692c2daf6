// A step's inputs from the arrays of the request table, and the table moved past the step.
#pragma once

#include <cstdint>
#include <vector>

namespace canter {

// The request table: R rows. Drafts of earlier steps stand in `drafts`.
struct TableArrays {
    std::int32_t* token_ids;  // [R, width]
    std::int32_t* total_len;  // [R]
    std::int32_t* num_computed;  // [R]
    const std::int64_t* drafts;  // [R, max_drafts]
    std::int64_t width, max_drafts;
};

// A state group's block table [R, width] and where to write this step's part of it.
struct GroupArrays {
    const std::int32_t* table;
    std::int64_t width, block_size, used;
    std::int32_t* block_table;  // [B, used]
    std::int64_t* slots;  // [T], or nullptr where nobody asks for them
};

struct GatherArgs {
    TableArrays table;
    const std::int64_t* rows;  // [B]
    const std::int64_t* num_tokens;  // [B]
    const std::int64_t* num_logits;  // [B]
    const std::int64_t* num_drafts;  // [B]
    const std::int64_t* drafts;  // the rows' drafts, one behind the other; -1: in the table's `drafts`
    std::int64_t requests;
    std::int64_t* token_ids;  // [T]
    std::int64_t* positions;  // [T]
    std::int64_t* logits_indices;  // [L]
    std::int64_t* logit_positions;  // [L]
    std::int64_t* logit_rows;  // [L]
    std::int32_t* query_start_loc;  // [B + 1]
    std::int32_t* seq_lens;  // [B]
    std::vector<GroupArrays> groups;
};

// Throws std::out_of_range for a row or position outside the table. Writes the drafts behind each row's known tokens.
void gather_step(const GatherArgs& args, std::int64_t max_rows);

struct AdvanceArgs {
    TableArrays table;
    const std::int64_t* rows;  // [B]
    const std::int64_t* num_tokens;  // [B]
    const std::int64_t* num_logits;  // [B]
    const std::int64_t* sampled;  // [L]
    std::int64_t* accepted;  // [S, width]
    std::int64_t* num_accepted;  // [S]
    const std::int64_t* token_ids;  // [T]: inputs of the step, drafts among them
    std::int64_t requests, width;
};

// Keeps each row's samples up to the first that differs from its draft, and moves the table past the step.
void advance_step(const AdvanceArgs& args);

}  // namespace canter
