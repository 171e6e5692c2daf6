#include "rope/rotary.h"

#include <stdexcept>
#include <string>

#include "isa/dispatch.h"
#include "parallel/rows.h"

namespace canter {

void rotary(const RotaryArgs& args) {
    for (std::int64_t i = 0; i < args.rows; ++i) {
        if (args.positions[i] < 0 || args.positions[i] >= args.max_pos) {
            throw std::out_of_range("rotary: positions must be in [0, " + std::to_string(args.max_pos) + "), got " +
                                    std::to_string(args.positions[i]) + ".");
        }
    }
    const KernelTable& k = kernels();
    const std::int64_t cost = 2 * (args.q_heads + args.k_heads) * args.rot_dim;
    for_rows(args.rows, cost, [&](std::int64_t begin, std::int64_t end) { k.rotary(args, begin, end); });
}

}  // namespace canter
