#include "isa/dispatch.h"

namespace canter {
namespace {

#if defined(CANTER_X86)
constexpr const KernelTable* kTables[kNumIsas] = {&kScalarKernels, &kAvx2Kernels, &kAvx512Kernels, nullptr, nullptr};
#else
constexpr const KernelTable* kTables[kNumIsas] = {&kScalarKernels, nullptr, nullptr, nullptr, nullptr};
#endif

}  // namespace

const KernelTable& kernels() { return best_table(kTables); }

}  // namespace canter
