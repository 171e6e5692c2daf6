#include "step/step.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace canter {
namespace {

void require_inside(std::int64_t value, std::int64_t end, const char* what) {
    if (value < 0 || value >= end) {
        throw std::out_of_range(std::string("gather_step: ") + what + " " + std::to_string(value) + " is outside [0, " +
                                std::to_string(end) + ").");
    }
}

}  // namespace

void gather_step(const GatherArgs& a, std::int64_t max_rows) {
    const TableArrays& t = a.table;
    std::int64_t token = 0, logit = 0, draft = 0;
    for (std::int64_t b = 0; b < a.requests; ++b) {
        const std::int64_t row = a.rows[b], count = a.num_tokens[b];
        require_inside(row, max_rows, "row");
        std::int32_t* ids = t.token_ids + row * t.width;
        const std::int64_t first = t.num_computed[row];
        require_inside(first + count - 1, t.width, "position");
        if (a.num_drafts[b]) require_inside(t.total_len[row] + a.num_drafts[b] - 1, t.width, "position");
        for (std::int64_t i = 0; i < a.num_drafts[b]; ++i) {
            const std::int64_t known = a.drafts[draft++];
            if (known < 0) require_inside(i, t.max_drafts, "draft");
            ids[t.total_len[row] + i] = static_cast<std::int32_t>(known < 0 ? t.drafts[row * t.max_drafts + i] : known);
        }
        a.query_start_loc[b] = static_cast<std::int32_t>(token);
        a.seq_lens[b] = static_cast<std::int32_t>(first + count);
        for (const GroupArrays& g : a.groups) {
            const std::int32_t* blocks = g.table + row * g.width;
            require_inside((first + count - 1) / g.block_size, g.width, "block");
            std::memcpy(g.block_table + b * g.used, blocks, static_cast<std::size_t>(g.used) * sizeof(std::int32_t));
            for (std::int64_t i = 0; g.slots && i < count; ++i) {
                const std::int64_t at = first + i;
                g.slots[token + i] = blocks[at / g.block_size] * g.block_size + at % g.block_size;
            }
        }
        for (std::int64_t i = 0; i < count; ++i) {
            a.token_ids[token + i] = ids[first + i];
            a.positions[token + i] = first + i;
        }
        token += count;
        for (std::int64_t i = 0; i < a.num_logits[b]; ++i, ++logit) {
            const std::int64_t at = token - a.num_logits[b] + i;
            a.logits_indices[logit] = at;
            a.logit_positions[logit] = a.positions[at];
            a.logit_rows[logit] = row;
        }
    }
    a.query_start_loc[a.requests] = static_cast<std::int32_t>(token);
}

void advance_step(const AdvanceArgs& a) {
    const TableArrays& t = a.table;
    std::int64_t token = 0, logit = 0, line = 0;
    for (std::int64_t b = 0; b < a.requests; ++b) {
        const std::int64_t row = a.rows[b], logits = a.num_logits[b];
        t.num_computed[row] += static_cast<std::int32_t>(a.num_tokens[b]);
        token += a.num_tokens[b];
        if (!logits) continue;
        // The token after each logit's own is the draft that it verifies; a row's last logit verifies none.
        std::int64_t right = 0;
        while (right + 1 < logits && a.token_ids[token - logits + right + 1] == a.sampled[logit + right]) ++right;
        const std::int64_t count = right + 1;
        std::int32_t* ids = t.token_ids + row * t.width + t.total_len[row];
        std::int64_t* out = a.accepted + line * a.width;
        for (std::int64_t i = 0; i < a.width; ++i) out[i] = i < logits ? a.sampled[logit + i] : 0;
        for (std::int64_t i = 0; i < count; ++i) ids[i] = static_cast<std::int32_t>(a.sampled[logit + i]);
        t.total_len[row] += static_cast<std::int32_t>(count);
        t.num_computed[row] -= static_cast<std::int32_t>(logits - count);
        a.num_accepted[line++] = count;
        logit += logits;
    }
}

}  // namespace canter
