#include "norm/norm.h"

#include "isa/dispatch.h"
#include "parallel/rows.h"

namespace canter {

void rms_norm(const NormArgs& args) {
    const KernelTable& k = kernels();
    for_rows(args.rows, 2 * args.width, [&](std::int64_t begin, std::int64_t end) { k.rms_norm(args, begin, end); });
}

void layer_norm(const LayerNormArgs& args) {
    const KernelTable& k = kernels();
    for_rows(args.rows, 3 * args.width, [&](std::int64_t begin, std::int64_t end) { k.layer_norm(args, begin, end); });
}

void sparse_relu(const SparseReluArgs& args) {
    const KernelTable& k = kernels();
    for_rows(args.rows, 3 * args.width, [&](std::int64_t begin, std::int64_t end) { k.sparse_relu(args, begin, end); });
}

}  // namespace canter
