#include <cstring>

#include "bench/limits.h"

#define CANTER_ISA scalar

namespace canter::scalar {

struct Reg {
    std::uint64_t words[4];
};

inline Reg zero() { return {}; }
inline Reg load(const std::uint8_t* p) {
    Reg r;
    std::memcpy(&r, p, sizeof r);
    return r;
}
inline Reg join(Reg a, Reg b) {
    return {{a.words[0] | b.words[0], a.words[1] | b.words[1], a.words[2] | b.words[2], a.words[3] | b.words[3]}};
}
inline std::uint64_t fold(Reg a) { return a.words[0] | a.words[1] | a.words[2] | a.words[3]; }

}  // namespace canter::scalar

#include "bench/read_kernel.h"

namespace canter::scalar {

constexpr int kLanes = 32;

// The compiler makes vectors of the baseline instruction set of this, as it does of the scalar kernels.
void fma_f32(std::int64_t rounds) {
    float sums[kLanes] = {}, a[kLanes], b = 0.5f;
    for (int i = 0; i < kLanes; ++i) a[i] = 1.0f;
    for (std::int64_t round = 0; round < rounds; ++round) {
        for (int i = 0; i < kLanes; ++i) sums[i] = sums[i] * b + a[i];
    }
    asm volatile("" : : "r"(sums) : "memory");
}

void dot_int8(std::int64_t rounds) {
    std::int32_t sums[kLanes] = {};
    std::int8_t a[kLanes], b[kLanes];
    for (int i = 0; i < kLanes; ++i) a[i] = static_cast<std::int8_t>(i), b[i] = static_cast<std::int8_t>(i - 7);
    for (std::int64_t round = 0; round < rounds; ++round) {
        asm volatile("" : : "r"(a), "r"(b) : "memory");  // the operands may have changed: nothing is worked out once for all rounds
        for (int i = 0; i < kLanes; ++i) sums[i] += a[i] * b[i];
    }
    asm volatile("" : : "r"(sums) : "memory");
}

}  // namespace canter::scalar

namespace canter {

const LimitKernels kScalarLimits = {scalar::read_streams, scalar::fma_f32, nullptr, scalar::dot_int8, 2 * scalar::kLanes, 0,
                                    2 * scalar::kLanes};

}  // namespace canter
