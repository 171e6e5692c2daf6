#include "quant/dequantize.h"

#include "isa/dispatch.h"
#include "parallel/thread_pool.h"

namespace canter {

void dequantize(const DequantizeArgs& args) {
    const KernelTable& k = kernels();
    const std::int64_t each = (1 << 16) / args.layout->elements;
    parallel_for((args.blocks + each - 1) / each, [&](std::int64_t i) {
        const std::int64_t begin = i * each, end = begin + each < args.blocks ? begin + each : args.blocks;
        k.dequantize(args, begin, end);
    });
}

}  // namespace canter
