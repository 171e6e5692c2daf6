#include "gemm/format.h"

#include <stdexcept>

#include "gemm/quant/quant.h"

namespace canter {
namespace {

constexpr int kCount = static_cast<int>(Format::count);
constexpr const char* kNames[kCount] = {"f32", "bf16", "i8", "w4", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"};

}  // namespace

const char* format_name(Format format) { return kNames[static_cast<int>(format)]; }

Format format_named(const std::string& name) {
    std::string known;
    for (int i = 0; i < kCount; ++i) {
        if (name == kNames[i]) return static_cast<Format>(i);
        known += (i ? ", " : "") + std::string(kNames[i]);
    }
    throw std::invalid_argument("Weight format must be one of " + known + ", got '" + name + "'.");
}

std::int64_t width_multiple(Format format) {
    switch (format) {
        case Format::f32:
        case Format::bf16:
        case Format::i8:
        case Format::q8_0: return 1;
        case Format::q4_k:
        case Format::q5_k:
        case Format::q6_k: return 256;
        default: return 32;
    }
}

std::int64_t panel_bytes(Format format, std::int64_t width, std::int64_t group) {
    if (width < 1 || width > kMaxWidth || width % width_multiple(format) != 0) {
        throw std::invalid_argument(std::string(format_name(format)) + " weights: expected a width that is a positive multiple of " +
                                    std::to_string(width_multiple(format)) + " (at most 2^31), got " + std::to_string(width) + ".");
    }
    if (format != Format::w4 && group != 0) {
        throw std::invalid_argument(std::string(format_name(format)) + " weights have no groups, got " + std::to_string(group) + ".");
    }
    switch (format) {
        case Format::f32: return width * kPanelOutputs * 4;
        case Format::bf16: return (width + 1) / 2 * kPanelOutputs * 4;
        default: return quant_panel_bytes(format, width, group);
    }
}

}  // namespace canter
