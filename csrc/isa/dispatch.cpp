#include "isa/dispatch.h"

namespace canter {
namespace {

#if defined(CANTER_X86)
constexpr const KernelTable* kTables[kNumIsas] = {&kScalarKernels, &kAvx2Kernels, &kAvx512Kernels};
#elif defined(CANTER_ARM)
constexpr const KernelTable* kTables[kNumIsas] = {&kScalarKernels, nullptr, nullptr, nullptr, nullptr, nullptr, &kNeonKernels};
#else
constexpr const KernelTable* kTables[kNumIsas] = {&kScalarKernels};
#endif

}  // namespace

const KernelTable& kernels() { return best_table(kTables); }

}  // namespace canter
