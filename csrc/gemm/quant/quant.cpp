#include "gemm/quant/quant.h"

#include <stdexcept>
#include <string>

#include "gemm/quant/layout.h"
#include "gemm/quant/tables.h"
#include "isa/isa.h"

namespace canter {
namespace {

#if defined(CANTER_X86)
constexpr const QuantTable* kTables[kNumIsas] = {&kScalarQuant, &kAvx2Quant, &kAvx512Quant, &kAvx512VnniQuant, nullptr, &kAmxQuant};
#elif defined(CANTER_ARM)
constexpr const QuantTable* kTables[kNumIsas] = {&kScalarQuant, nullptr, nullptr, nullptr, nullptr, nullptr, &kNeonQuant, &kNeonDotQuant};
#else
constexpr const QuantTable* kTables[kNumIsas] = {&kScalarQuant};
#endif

std::int64_t block_bytes(const Weights& w) {
    const QuantLayoutInfo layout = quant_layout(w.format);
    return layout.header + (layout.block_runs ? layout.block_runs : w.group / kRun) * layout.run_bytes();
}

}  // namespace

RowFamily row_family(Format format) {
    switch (format) {
        case Format::f32:
        case Format::bf16: return RowFamily::floats;
        case Format::w4: return RowFamily::halves;
        default: return RowFamily::runs;
    }
}

std::int64_t quant_panel_bytes(Format format, std::int64_t width, std::int64_t group) {
    const QuantLayoutInfo layout = quant_layout(format);
    const std::string name = format_name(format);
    if (layout.bits == 0) throw std::invalid_argument(name + " is not a quantised format.");
    if (layout.bits == 8) return quant_lead(format) + row_runs(width) * (layout.header + layout.run_bytes());
    if (format == Format::w4) {
        if (group <= 0 || group % kRun != 0 || width % group != 0) {
            throw std::invalid_argument(name + ": groups of " + std::to_string(group) + " elements do not divide a width of " +
                                        std::to_string(width) + " into multiples of " + std::to_string(kRun) + ".");
        }
        return width / group * (layout.header + group / kRun * layout.run_bytes());
    }
    const std::int64_t elements = layout.block_runs * kRun;
    if (width % elements != 0) {
        throw std::invalid_argument(name + ": a width of " + std::to_string(width) + " is not a multiple of " + std::to_string(elements) +
                                    ".");
    }
    return width / elements * (layout.header + layout.block_runs * layout.run_bytes());
}

std::int64_t quantized_row_bytes(std::int64_t width) { return row_pitch(width) * static_cast<std::int64_t>(sizeof(RowRun)); }

void quantize_rows(const QuantizeCall& call, std::int64_t row_begin, std::int64_t row_end) {
    best_table(kTables).quantize(call, row_begin, row_end);
}

int quant_streams(Format format, std::int64_t rows) { return rows == 1 ? best_table(kTables).streams(format) : 1; }

std::int64_t quant_scratch_bytes(Format format, std::int64_t width, std::int64_t rows) {
    return best_table(kTables).scratch_bytes(format, width, rows);
}

void quant_tile(const QuantTile& tile, void* scratch) {
    const Weights& w = *tile.w;
    best_table(kTables).tile(tile, block_bytes(w), quant_panel_bytes(w.format, w.width, w.group), static_cast<std::uint8_t*>(scratch));
}

}  // namespace canter
