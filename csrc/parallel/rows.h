// Split rows over threads when there is enough work.
#pragma once

#include <algorithm>

#include "parallel/thread_pool.h"

namespace canter {

// body(begin, end) for ranges that cover [0, rows); `cost` is the work of a row, in elements touched.
template <class F>
void for_rows(std::int64_t rows, std::int64_t cost, const F& body) {
    if (rows == 0) return;
    constexpr std::int64_t least = 1 << 14;  // elements worth handing to another thread
    const std::int64_t each = std::max<std::int64_t>(1, least / std::max<std::int64_t>(1, cost));
    const std::int64_t shares = std::min((rows + each - 1) / each, static_cast<std::int64_t>(4) * num_threads());
    if (shares <= 1) return body(std::int64_t{0}, rows);
    parallel_for(shares, [&](std::int64_t i) {
        const std::int64_t begin = rows * i / shares, end = rows * (i + 1) / shares;
        if (begin < end) body(begin, end);
    });
}

}  // namespace canter
