#include "gemm/float_lanes512.h"

namespace canter {
namespace {

using Lanes = Lanes512;

}  // namespace
}  // namespace canter

#include "gemm/float_kernel.h"

namespace canter {

const FloatKernels kAvx512FloatKernels = kFloatKernels;

}  // namespace canter
