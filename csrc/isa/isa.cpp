#include "isa/isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(CANTER_X86) && !defined(CANTER_SIMDE) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(CANTER_ARM) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace canter {
namespace {

constexpr const char* kNames[kNumIsas] = {"scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx", "neon", "neon_dot"};

#if defined(CANTER_X86) && !defined(CANTER_SIMDE)
// Tiles are large, so Linux wants to be asked before a process uses them.
bool may_use_tiles() {
#if defined(__linux__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned tile = 1u << 24, int8 = 1u << 25;
    if ((d & tile) == 0 || (d & int8) == 0) return false;
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}
#endif

Isa find_best() {
#if defined(CANTER_SIMDE)
    return Isa::amx;
#elif defined(CANTER_X86)
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))) return Isa::scalar;
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
          __builtin_cpu_supports("avx512dq"))) {
        return Isa::avx2;
    }
    if (!__builtin_cpu_supports("avx512vnni")) return Isa::avx512;
    if (!__builtin_cpu_supports("avx512bf16")) return Isa::avx512_vnni;
    return may_use_tiles() ? Isa::amx : Isa::avx512_bf16;
#elif defined(CANTER_ARM) && defined(__APPLE__)
    return Isa::neon_dot;
#elif defined(CANTER_ARM)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0 ? Isa::neon_dot : Isa::neon;
#else
    return Isa::scalar;
#endif
}

Isa best_supported() {
    static const Isa best = find_best();
    return best;
}

std::atomic<int> current{-1};

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

std::vector<std::string> supported_isas() {
#if defined(CANTER_ARM)
    const int first = static_cast<int>(Isa::neon);
#else
    const int first = static_cast<int>(Isa::avx2);
#endif
    std::vector<std::string> names = {isa_name(Isa::scalar)};
    names.insert(names.end(), kNames + first, kNames + std::max(first, static_cast<int>(best_supported()) + 1));
    return names;
}

void set_isa(const std::string& name) {
    const std::vector<std::string> supported = supported_isas();
    std::string known;
    for (int i = 0; i < kNumIsas; ++i) {
        if (name == kNames[i]) {
            const bool has = std::find(supported.begin(), supported.end(), name) != supported.end();
            current.store(has ? i : static_cast<int>(best_supported()));
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
        set_isa(wanted && *wanted ? wanted : isa_name(best_supported()));
        isa = current.load();
    }
    return static_cast<Isa>(isa);
}

}  // namespace canter
