// The read loop over vectors of any width. Included once per instruction set.
// Expects Reg, load, accumulate and fold in namespace canter::CANTER_ISA.

#include "bench/limits.h"

namespace canter::CANTER_ISA {

// A granule of every stream in turn. The streams lie far apart, so that several pages of the memory are open at once.
template <int Streams, bool Ask>
inline std::uint64_t read_turns(const std::uint8_t* begin, std::int64_t num_bytes) {
    constexpr int bytes = static_cast<int>(sizeof(Reg)), ahead = 2048;
    const std::int64_t length = num_bytes / Streams;
    Reg sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[i] = zero();
    for (std::int64_t at = 0; at < length; at += 256) {
#pragma GCC unroll 4
        for (int s = 0; s < Streams; ++s) {
            const std::uint8_t* p = begin + s * length + at;
            if constexpr (Ask) {
#pragma GCC unroll 4
                for (int line = 0; line < 256; line += 64) __builtin_prefetch(p + line + ahead);
            }
#pragma GCC unroll 16
            for (int i = 0; i < 256 / bytes; ++i) sums[i % 4] = join(sums[i % 4], load(p + i * bytes));
        }
    }
    return fold(join(join(sums[0], sums[1]), join(sums[2], sums[3])));
}

inline std::uint64_t read_streams(const std::uint8_t* begin, std::int64_t num_bytes, bool ask_ahead) {
    return ask_ahead ? read_turns<kReadStreams, true>(begin, num_bytes) : read_turns<kReadStreams / 2, false>(begin, num_bytes);
}

}  // namespace canter::CANTER_ISA
