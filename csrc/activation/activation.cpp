#include "activation/activation.h"

#include "isa/dispatch.h"
#include "parallel/rows.h"

namespace canter {

void gated(const GatedArgs& args) {
    const KernelTable& k = kernels();
    for_rows(args.rows, 8 * args.width, [&](std::int64_t begin, std::int64_t end) { k.gated(args, begin, end); });
}

void pointwise(const PointwiseArgs& args) {
    const KernelTable& k = kernels();
    for_rows(args.rows, 4 * args.width, [&](std::int64_t begin, std::int64_t end) { k.pointwise(args, begin, end); });
}

void softcap(const SoftcapArgs& args) {
    const KernelTable& k = kernels();
    // Chunks of whole vectors of any width, so that an element's place in its vector does not depend on the threads.
    constexpr std::int64_t chunk = 64;
    for_rows((args.count + chunk - 1) / chunk, 8 * chunk, [&](std::int64_t begin, std::int64_t end) {
        k.softcap(args, begin * chunk, std::min(end * chunk, args.count));
    });
}

}  // namespace canter
