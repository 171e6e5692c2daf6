// Instruction sets, least first; a machine has those of its architecture and scalar. Which of them run is decided once, at run time.
#pragma once

#include <string>
#include <vector>

namespace canter {

// x86: avx512 is F, BW, VL and DQ; avx512_vnni adds VNNI (and VBMI is not assumed); avx512_bf16 adds BF16 to that, and amx tiles of
// bytes (AMX-TILE, AMX-INT8). Arm: neon, which every AArch64 machine has; neon_dot adds the dot products of bytes (SDOT).
enum class Isa : int { scalar, avx2, avx512, avx512_vnni, avx512_bf16, amx, neon, neon_dot, count };

inline constexpr int kNumIsas = static_cast<int>(Isa::count);

// The instruction set in use: at first the best that this machine supports, or what CANTER_ISA names if the machine has that.
Isa active_isa();

const char* isa_name(Isa isa);

// Names of the instruction sets that this machine supports, best last.
std::vector<std::string> supported_isas();

// Use the named instruction set, or the best of this machine where it lacks that. Throws std::invalid_argument for an unknown name.
void set_isa(const std::string& name);

// Of tables by instruction set, some of them null, the best that may run. The scalar one must exist.
template <class Table>
const Table& best_table(const Table* const (&tables)[kNumIsas]) {
    int i = static_cast<int>(active_isa());
    while (!tables[i]) --i;
    return *tables[i];
}

}  // namespace canter
