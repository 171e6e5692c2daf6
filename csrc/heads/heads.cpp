#include "heads/heads.h"

#include "isa/dispatch.h"
#include "parallel/rows.h"

namespace canter {

void head_linear(const HeadLinearArgs& args) {
    const KernelTable& k = kernels();
    const std::int64_t cost = args.width * args.outputs / 4;
    for_rows(args.rows * args.heads, cost, [&](std::int64_t begin, std::int64_t end) { k.head_linear(args, begin, end); });
}

}  // namespace canter
