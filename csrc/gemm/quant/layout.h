// How the panels of quantised formats and the rows quantised for them look inside. Plain data and constants only: files of
// every instruction set read this.
//
// A run is 32 neighbouring elements of the width; its codes of sixteen outputs lie as bytes [group of 4 elements][output]
// [element], so that a lane of 32 bits holds four elements of one output, as a byte product instruction wants them.
//   4 bits: 256 bytes, two groups to a byte: group 2q in the low halves, 2q + 1 in the high halves of bytes [64q, 64q + 64).
//   5 bits: then 64 bytes [output][element of its group]; bit g is the fifth bit of group g.
//   6 bits: then 128 bytes; bits 2j, 2j + 1 of the first 64 are the upper ones of group j, of the next 64 those of group 4 + j.
//   8 bits: 512 bytes.
// A block is what shares a header of scales: one run, or the 256 elements of the K-quants, or a group of w4. A panel is its
// blocks one after the other, each its header and then its runs, so that a kernel reads a panel from end to end. Headers:
//   q4_0, q5_0, q8_0: f16 d[16]. q4_1, q5_1: f16 d[16], m[16].
//   q4_k, q5_k: f16 d[16], dmin[16]; u8 scales[8][16], minima[8][16]. q6_k: f16 d[16]; s8 scales[16][16].
//   w4: f32 scales[16]; u8 zeros[16].
//   i8: none; the panel itself starts with f32 scales[16].
#pragma once

#include <cstdint>

#include "gemm/format.h"

namespace canter {

inline constexpr std::int64_t kRun = 32;

struct QuantLayoutInfo {
    int bits;
    int block_runs;  // runs that share a header; 0: by the group (w4)
    int header;      // bytes
    int offset;      // what is taken off an unsigned code; i8 and q8_0 have signed ones
    bool minima;     // values are scale * code + minimum
    bool halves;     // a scale for every 16 elements

    constexpr int run_bytes() const { return bits == 8 ? 512 : bits == 6 ? 384 : bits == 5 ? 320 : 256; }
};

inline constexpr QuantLayoutInfo quant_layout(Format format) {
    switch (format) {
        case Format::i8: return {8, 1, 0, 0, false, false};
        case Format::w4: return {4, 0, 80, 0, false, false};
        case Format::q4_0: return {4, 1, 32, 8, false, false};
        case Format::q4_1: return {4, 1, 64, 0, true, false};
        case Format::q5_0: return {5, 1, 32, 16, false, false};
        case Format::q5_1: return {5, 1, 64, 0, true, false};
        case Format::q8_0: return {8, 1, 32, 0, false, false};
        case Format::q4_k: return {4, 8, 320, 0, true, false};
        case Format::q5_k: return {5, 8, 320, 0, true, false};
        case Format::q6_k: return {6, 8, 288, 32, false, true};
        default: return {0, 0, 0, 0, false, false};
    }
}

// Bytes before the first block of a panel.
inline constexpr int quant_lead(Format format) { return format == Format::i8 ? 64 : 0; }

// A run of a quantised row. Where codes are summed in 16 bits, their offset must be taken off there, or the sums would not
// fit; so a sum starts at what the offset amounts to, in the form of that sum: for sums in 32 bits -offset times the sum of
// x, for sums in 16 bits two such numbers side by side, for elements 0, 1 and 2, 3 of every group.
//
// Rows for w4 have two scales a run: 16 elements share one. The first half's scale and sum are where those of a run are.
struct alignas(64) RowRun {
    std::int8_t codes[32];
    float scale;
    union {
        float scaled_sum;    // scale times the sum of the codes
        float second_scale;  // w4
    };
    std::int32_t sum;  // of the codes
    union {
        std::int32_t start8;      // for an offset of 8
        std::int32_t second_sum;  // w4
    };
    std::int32_t start16;     // for an offset of 16
    std::int32_t start32[2];  // for an offset of 32, of either half of the run
    std::int32_t extra;       // sums in 32 bits: for an offset of 128; in 16 bits: 16 * sum
};
static_assert(sizeof(RowRun) == 64);

inline std::int64_t row_runs(std::int64_t width) { return (width + kRun - 1) / kRun; }

// An odd number of cache lines, so that the rows of a tile don't fall on the same sets of the cache.
inline std::int64_t row_pitch(std::int64_t width) { return row_runs(width) | 1; }

}  // namespace canter
