// Types that every kernel knows. Compiled by files with different instruction sets: plain data only, no functions.
#pragma once

#include <cstdint>

namespace canter {

enum class DType : int { float32 = 0, bfloat16 = 1 };

struct bf16 {
    std::uint16_t bits;
};

inline constexpr std::int64_t dtype_bytes(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

}  // namespace canter
