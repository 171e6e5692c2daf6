#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "parallel/rows.h"
#include "sampling/sampling.h"

namespace canter {
namespace {

void require_below(const char* op, const char* what, const std::int64_t* values, std::int64_t count, std::int64_t limit) {
    for (std::int64_t i = 0; i < count; ++i) {
        if (values[i] < 0 || values[i] >= limit) {
            throw std::out_of_range(std::string(op) + ": " + what + " must be in [0, " + std::to_string(limit) + "), got " +
                                    std::to_string(values[i]) + ".");
        }
    }
}

// Whether the tokens before a word's logit end in its prefix. A place before the first token to compare holds nothing.
bool follows_prefix(const ForbidArgs& a, std::int64_t word) {
    const std::int64_t end = a.total_len[a.rows[word]] + a.drafts[word];
    for (std::int64_t back = 0; back < a.lengths[word]; ++back) {
        const std::int64_t at = end - 1 - back;
        if (at < a.first[word]) return false;
        const std::int64_t token =
            back < a.drafts[word] ? a.input_ids[a.lines[word] - back] : a.token_ids[a.rows[word] * a.width + at];
        if (token != a.prefixes[(word + 1) * a.longest - 1 - back]) return false;
    }
    return true;
}

}  // namespace

void allow_tokens(const AllowArgs& a) {
    require_below("allow_tokens", "lines", a.lines, a.count, a.rows);
    require_below("allow_tokens", "token ids", a.ids, a.count ? a.starts[a.count] : 0, a.vocab);
    for_rows(a.count, a.vocab, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t n = begin; n < end; ++n) {
            float* row = a.logits + a.lines[n] * a.vocab;
            const std::int64_t* ids = a.ids + a.starts[n];
            const std::int64_t allowed = a.starts[n + 1] - a.starts[n];
            float* kept = scratch_floats(Scratch::task, static_cast<std::size_t>(allowed) + 1);
            for (std::int64_t i = 0; i < allowed; ++i) kept[i] = row[ids[i]];
            std::fill(row, row + a.vocab, -std::numeric_limits<float>::infinity());
            for (std::int64_t i = 0; i < allowed; ++i) row[ids[i]] = kept[i];
        }
    });
}

void mask_tokens(const MaskArgs& a) {
    require_below("mask_tokens", "lines", a.lines, a.count, a.rows);
    const std::int64_t words = (a.vocab + 31) / 32;
    for_rows(a.count, a.vocab, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t n = begin; n < end; ++n) {
            float* row = a.logits + a.lines[n] * a.vocab;
            for (std::int64_t w = 0; w < words; ++w) {
                const auto bits = static_cast<std::uint32_t>(a.masks[n * words + w]);
                if (bits == 0xffffffffu) continue;  // most words of a text's mask; most others are zero
                const std::int64_t size = std::min<std::int64_t>(32, a.vocab - 32 * w);
                for (std::int64_t i = 0; i < size; ++i) {
                    if (!(bits >> i & 1u)) row[32 * w + i] = -std::numeric_limits<float>::infinity();
                }
            }
        }
    });
}

void add_to_tokens(const AddArgs& a) {
    require_below("add_to_tokens", "lines", a.lines, a.count, a.rows);
    require_below("add_to_tokens", "token ids", a.ids, a.count, a.vocab);
    for (std::int64_t i = 0; i < a.count; ++i) a.logits[a.lines[i] * a.vocab + a.ids[i]] += a.values[i];
}

void forbid_words(const ForbidArgs& a) {
    require_below("forbid_words", "lines", a.lines, a.count, a.num_lines);
    require_below("forbid_words", "token ids", a.last, a.count, a.vocab);
    require_below("forbid_words", "rows", a.rows, a.count, a.num_rows);
    require_below("forbid_words", "lengths of prefixes", a.lengths, a.count, a.longest + 1);
    for (std::int64_t k = 0; k < a.count; ++k) {
        const std::int64_t known = a.total_len[a.rows[k]], most = a.input_ids ? a.lines[k] + 1 : 0;
        if (known < 0 || known > a.width || a.first[k] < 0 || a.drafts[k] < 0 || a.drafts[k] > most) {
            throw std::out_of_range("forbid_words: " + std::to_string(known) + " tokens, " + std::to_string(a.drafts[k]) +
                                    " drafts and a first token of " + std::to_string(a.first[k]) + " do not lie within their tables.");
        }
    }
    for (std::int64_t k = 0; k < a.count; ++k) {
        if (follows_prefix(a, k)) a.logits[a.lines[k] * a.vocab + a.last[k]] = -std::numeric_limits<float>::infinity();
    }
}

}  // namespace canter
