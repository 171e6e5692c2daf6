// What this machine can do at most: bytes read from memory a second, and operations a second of each kind of product.
// Speeds are set beside these figures, so they are taken by the same instructions as the kernels use.
#pragma once

#include <cstdint>
#include <string>

namespace canter {

// One instruction set's loops. A null one means that it has no instruction of that kind.
struct LimitKernels {
    // Reads every byte of [begin, begin + num_bytes) once, several streams at a time; a multiple of kReadGranule bytes.
    // Several streams, the memory asked ahead; or half as many, along which the machine itself looks ahead.
    std::uint64_t (*read)(const std::uint8_t* begin, std::int64_t num_bytes, bool ask_ahead);
    // `rounds` times the same independent products, their operands in registers.
    void (*fma_f32)(std::int64_t rounds);
    void (*dot_bf16)(std::int64_t rounds);
    void (*dot_int8)(std::int64_t rounds);
    // Operations (a multiplication and an addition are two) of a round of each.
    std::int64_t f32_operations, bf16_operations, int8_operations;
};

inline constexpr int kReadStreams = 4;
inline constexpr std::int64_t kReadGranule = kReadStreams * 256;

extern const LimitKernels kScalarLimits;
#if defined(CANTER_X86)
extern const LimitKernels kAvx2Limits;
extern const LimitKernels kAvx512Limits;
extern const LimitKernels kAvx512VnniLimits;
extern const LimitKernels kAvx512Bf16Limits;
extern const LimitKernels kAmxLimits;
#elif defined(CANTER_ARM)
extern const LimitKernels kNeonLimits;
extern const LimitKernels kNeonDotLimits;
#endif

// Bytes a second that `threads` threads together read from an array of about `num_bytes`: the best of `passes` in
// either way.
double read_bandwidth(std::int64_t num_bytes, int threads, int passes);

// Operations a second of `threads` threads together: "float32", "bfloat16" (products of bfloat16 pairs summed in float32
// by one instruction) or "int8" (sums of int8 products in int32). 0 where the instruction set in use has no such
// instruction. Throws std::invalid_argument for another kind.
double peak_operations(const std::string& kind, int threads);

}  // namespace canter
