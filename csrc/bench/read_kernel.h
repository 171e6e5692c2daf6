// The read loop over vectors of any width. Included once per instruction set.
// Expects Reg, load, accumulate and fold in namespace canter::CANTER_ISA.

#include "bench/limits.h"

namespace canter::CANTER_ISA {

// A granule of every stream in turn. The streams lie far apart, so that several pages of the memory are open at once.
inline std::uint64_t read_streams(const std::uint8_t* begin, std::int64_t num_bytes) {
    constexpr int streams = kReadStreams, bytes = static_cast<int>(sizeof(Reg)), ahead = 2048;
    const std::int64_t length = num_bytes / streams;
    Reg sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[i] = zero();
    for (std::int64_t at = 0; at < length; at += 256) {
#pragma GCC unroll 4
        for (int s = 0; s < streams; ++s) {
            const std::uint8_t* p = begin + s * length + at;
#pragma GCC unroll 4
            for (int line = 0; line < 256; line += 64) __builtin_prefetch(p + line + ahead);
#pragma GCC unroll 16
            for (int i = 0; i < 256 / bytes; ++i) sums[i % 4] = join(sums[i % 4], load(p + i * bytes));
        }
    }
    return fold(join(join(sums[0], sums[1]), join(sums[2], sums[3])));
}

}  // namespace canter::CANTER_ISA
