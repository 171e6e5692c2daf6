#include "isa/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace canter {
namespace {

constexpr const char* kNames[kNumIsas] = {"scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16"};

Isa best_supported() {
#if defined(CANTER_SIMDE)
    return Isa::avx512_bf16;
#elif defined(CANTER_X86)
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))) return Isa::scalar;
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
          __builtin_cpu_supports("avx512dq"))) {
        return Isa::avx2;
    }
    if (!__builtin_cpu_supports("avx512vnni")) return Isa::avx512;
    return __builtin_cpu_supports("avx512bf16") ? Isa::avx512_bf16 : Isa::avx512_vnni;
#else
    return Isa::scalar;
#endif
}

std::atomic<int> current{-1};

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

std::vector<std::string> supported_isas() { return {kNames, kNames + static_cast<int>(best_supported()) + 1}; }

void set_isa(const std::string& name) {
    const int best = static_cast<int>(best_supported());
    std::string known;
    for (int i = 0; i < kNumIsas; ++i) {
        if (name == kNames[i]) {
            current.store(i < best ? i : best);
            return;
        }
        known += (i ? ", " : "") + std::string(kNames[i]);
    }
    throw std::invalid_argument("CANTER_ISA must be one of " + known + ", got '" + name + "'.");
}

Isa active_isa() {
    int isa = current.load(std::memory_order_relaxed);
    if (isa < 0) {
        const char* wanted = std::getenv("CANTER_ISA");
        set_isa(wanted && *wanted ? wanted : kNames[kNumIsas - 1]);
        isa = current.load();
    }
    return static_cast<Isa>(isa);
}

}  // namespace canter
