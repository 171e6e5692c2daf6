// Portable vectors of four lanes: the compiler maps them to what every machine of the architecture has.
#include <cstring>

#include "gemm/float_table.h"

namespace canter {
namespace {

struct Lanes {
    static constexpr int width = 4;
    static constexpr int max_rows = 2, few_rows = 2, block_panels = 1;
    static constexpr int stream_panels(int rows) { return rows == 1 ? 2 : 1; }

    typedef float reg __attribute__((vector_size(16)));
    typedef std::uint32_t pairs __attribute__((vector_size(16)));

    static reg zero() { return set1(0.0f); }
    static reg set1(float x) { return reg{x, x, x, x}; }
    static reg load(const float* p) {
        reg v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static void store(float* p, reg v) { std::memcpy(p, &v, sizeof v); }
    static reg load_bf16(const bf16* p) { return reg(pairs{p[0].bits, p[1].bits, p[2].bits, p[3].bits} << 16); }
    static void store_bf16(bf16* p, reg v) {
        const pairs bits = pairs(v), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, is_nan = pairs(v != v);
        const pairs out = (is_nan & 0x7fc0u) | (~is_nan & rounded);
        for (int i = 0; i < 4; ++i) p[i].bits = static_cast<std::uint16_t>(out[i]);
    }
    static reg add(reg a, reg b) { return a + b; }
    static reg fma(reg a, reg b, reg c) { return a * b + c; }
    static void pin(reg&) {}

    static pairs load_pairs(const std::uint8_t* p) {
        pairs v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static reg even(pairs p) { return reg(p << 16); }
    static reg odd(pairs p) { return reg(p & 0xffff0000u); }
};

}  // namespace
}  // namespace canter

#include "gemm/float_kernel.h"

namespace canter {

const FloatKernels kScalarFloatKernels = kFloatKernels;

}  // namespace canter
