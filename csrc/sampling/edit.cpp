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

void add_to_tokens(const AddArgs& a) {
    require_below("add_to_tokens", "lines", a.lines, a.count, a.rows);
    require_below("add_to_tokens", "token ids", a.ids, a.count, a.vocab);
    for (std::int64_t i = 0; i < a.count; ++i) a.logits[a.lines[i] * a.vocab + a.ids[i]] += a.values[i];
}

}  // namespace canter
