#include "gemm/quant/quant.h"

#include <stdexcept>
#include <string>

namespace canter {
namespace {

[[noreturn]] void refuse(Format format) { throw std::invalid_argument(std::string(format_name(format)) + ": no kernels in this build."); }

}  // namespace

RowFamily row_family(Format format) {
    switch (format) {
        case Format::f32:
        case Format::bf16: return RowFamily::floats;
        case Format::i8: return RowFamily::runs128;
        default: return RowFamily::runs32;
    }
}

std::int64_t quant_panel_bytes(Format format, std::int64_t, std::int64_t) { refuse(format); }

std::int64_t quantized_row_bytes(RowFamily, std::int64_t) { return 0; }

void quantize_rows(const QuantizeCall&, std::int64_t, std::int64_t) {}

std::int64_t quant_scratch_bytes(Format, std::int64_t, std::int64_t, std::int64_t) { return 0; }

void quant_tile(const QuantTile&, void*) {}

void pack_blocks(Format format, const void*, std::int64_t, const std::int64_t*, std::int64_t, std::int64_t, std::uint8_t*) { refuse(format); }

void pack_i8(const std::int8_t*, const float*, const std::int64_t*, std::int64_t, std::int64_t, std::uint8_t*) { refuse(Format::i8); }

void pack_w4(const std::uint8_t*, const float*, const std::uint8_t*, const std::int64_t*, std::int64_t, std::int64_t, std::int64_t, std::uint8_t*) {
    refuse(Format::w4);
}

void unpack_quant_rows(const Weights& w, std::int64_t, std::int64_t, float*, std::int64_t) { refuse(w.format); }

}  // namespace canter
