// The small ops' kernels for the instruction set in use.
#pragma once

#include "isa/isa.h"
#include "isa/kernel_table.h"

namespace canter {

const KernelTable& kernels();

}  // namespace canter
