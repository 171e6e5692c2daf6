// GGUF blocks to float32 or bfloat16, bit for bit what the format's definition gives in float32 arithmetic.
#pragma once

#include <cstdint>

#include "common.h"

namespace canter {

enum class QuantType : int { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS };

struct QuantLayout {
    const char* name;
    QuantType type;
    std::int64_t elements, bytes;  // of a block
};

inline constexpr QuantLayout kQuantLayouts[] = {
    {"F32", QuantType::F32, 1, 4},      {"F16", QuantType::F16, 1, 2},      {"BF16", QuantType::BF16, 1, 2},
    {"Q4_0", QuantType::Q4_0, 32, 18},  {"Q4_1", QuantType::Q4_1, 32, 20},  {"Q5_0", QuantType::Q5_0, 32, 22},
    {"Q5_1", QuantType::Q5_1, 32, 24},  {"Q8_0", QuantType::Q8_0, 32, 34},  {"Q2_K", QuantType::Q2_K, 256, 84},
    {"Q3_K", QuantType::Q3_K, 256, 110}, {"Q4_K", QuantType::Q4_K, 256, 144}, {"Q5_K", QuantType::Q5_K, 256, 176},
    {"Q6_K", QuantType::Q6_K, 256, 210}, {"IQ4_NL", QuantType::IQ4_NL, 32, 18},
    {"IQ4_XS", QuantType::IQ4_XS, 256, 136},
};

struct DequantizeArgs {
    const std::uint8_t* data;
    void* out;
    DType out_type;
    const QuantLayout* layout;
    std::int64_t blocks;
};

void dequantize(const DequantizeArgs& args);

}  // namespace canter
