// Run-time choice of the instruction set.
#pragma once

#include <string>
#include <vector>

#include "isa/kernel_table.h"

namespace canter {

// Names of the instruction sets that this machine supports, best last.
std::vector<std::string> supported_isas();

// The kernels in use. At first the best supported, or what the environment variable CANTER_ISA names if that is lower.
const KernelTable& kernels();

// Use the named instruction set, or the best supported below it. Throws std::invalid_argument for an unknown name.
void set_isa(const std::string& name);

}  // namespace canter
