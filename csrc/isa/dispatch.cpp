#include "isa/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace canter {
namespace {

struct Isa {
    const char* name;
    const KernelTable* table;  // null: not compiled for this architecture
    bool (*supported)();
};

bool always() { return true; }

#if defined(CANTER_X86)
bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

constexpr Isa kIsas[] = {{"scalar", &kScalarKernels, always}, {"avx2", &kAvx2Kernels, has_avx2}, {"avx512", &kAvx512Kernels, has_avx512}};
#else
bool never() { return false; }

constexpr Isa kIsas[] = {{"scalar", &kScalarKernels, always}, {"avx2", nullptr, never}, {"avx512", nullptr, never}};
#endif

std::atomic<const KernelTable*> current{nullptr};

}  // namespace

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : kIsas) {
        if (isa.supported()) names.emplace_back(isa.name);
    }
    return names;
}

void set_isa(const std::string& name) {
    const KernelTable* best = nullptr;
    for (const Isa& isa : kIsas) {
        if (isa.supported()) best = isa.table;
        if (name == isa.name) {
            current.store(best);
            return;
        }
    }
    throw std::invalid_argument("CANTER_ISA must be one of scalar, avx2, avx512, got '" + name + "'.");
}

const KernelTable& kernels() {
    const KernelTable* table = current.load(std::memory_order_relaxed);
    if (!table) {
        const char* wanted = std::getenv("CANTER_ISA");
        set_isa(wanted && *wanted ? wanted : "avx512");
        table = current.load();
    }
    return *table;
}

}  // namespace canter
