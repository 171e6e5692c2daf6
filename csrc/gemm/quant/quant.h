// Quantised weights times activations that are quantised on the fly. What a panel and a quantised row look like inside is
// this directory's business alone.
#pragma once

#include <cstdint>

#include "common.h"
#include "gemm/format.h"

namespace canter {

// How a format wants its activations. Formats of one family share the quantised rows. runs: int8, one scale (amax / 127,
// rounded to nearest even) for every 32 elements; halves: for every 16.
enum class RowFamily : int { floats, runs, halves };

RowFamily row_family(Format format);

// Bytes of one panel of a quantised format. Throws std::invalid_argument for a width or group that it can't hold.
std::int64_t quant_panel_bytes(Format format, std::int64_t width, std::int64_t group);

// Bytes of one quantised row, a multiple of 64.
std::int64_t quantized_row_bytes(std::int64_t width);

struct QuantizeCall {
    const void* x;  // rows of `width` elements, `x_stride` elements apart
    DType x_type;
    std::int64_t x_stride, width;
    RowFamily family;  // not floats
    void* rows;  // 64-byte aligned; quantized_row_bytes() each
};

// Rows [row_begin, row_end), on the calling thread.
void quantize_rows(const QuantizeCall& call, std::int64_t row_begin, std::int64_t row_end);

// Panels [panel_begin, panel_end) of w times rows [row_begin, row_end). `out` takes the sums of row `row_begin` first,
// sixteen floats a panel from `panel_begin` on (those of the last panel's padding too), the next row out_stride floats on.
struct QuantTile {
    const Weights* w;
    const void* rows;  // row 0
    std::int64_t panel_begin, panel_end;
    std::int64_t apart;  // not 0, where quant_streams() is 2: also as many panels so much further on, their sums behind the others'
    std::int64_t row_begin, row_end;
    float* out;
    std::int64_t out_stride;
};

// Panels, 1 or 2, that are best read side by side for so many rows.
int quant_streams(Format format, std::int64_t rows);

// Bytes of scratch that quant_tile wants for tiles of so many rows.
std::int64_t quant_scratch_bytes(Format format, std::int64_t width, std::int64_t rows);

// On the calling thread. `scratch` is 64-byte aligned. Sums carry no bias.
void quant_tile(const QuantTile& tile, void* scratch);

// The pack functions fill the panels of outputs [0, outputs); output n comes from row row_index[n], or n where row_index
// is null. They use all threads. `dest` is 64-byte aligned and holds num_panels(outputs) panels.

// GGUF blocks: rows of `width` elements, whole blocks of them, src_row_bytes apart.
void pack_blocks(Format format, const void* source, std::int64_t src_row_bytes, const std::int64_t* row_index, std::int64_t outputs,
                 std::int64_t width, std::uint8_t* dest);

// int8 weights [N, width] and a scale for each row of them.
void pack_i8(const std::int8_t* codes, const float* scales, const std::int64_t* row_index, std::int64_t outputs, std::int64_t width,
             std::uint8_t* dest);

// Codes 0..15, a byte each, [N, width]; scales and zeros [N, width / group].
void pack_w4(const std::uint8_t* codes, const float* scales, const std::uint8_t* zeros, const std::int64_t* row_index, std::int64_t outputs,
             std::int64_t width, std::int64_t group, std::uint8_t* dest);

// One block of one output into a q8_0 panel: 32 codes, and their scale in float16.
void put_q8_0(std::uint8_t* panel, std::int64_t block, int lane, const std::int8_t* codes, std::uint16_t scale);

// Float values of outputs [begin, end) of a quantised matrix: out[end - begin, width], out_stride floats apart.
void unpack_quant_rows(const Weights& w, std::int64_t begin, std::int64_t end, float* out, std::int64_t out_stride);

}  // namespace canter
