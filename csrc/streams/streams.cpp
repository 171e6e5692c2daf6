#include "streams/streams.h"

#include "isa/dispatch.h"
#include "parallel/rows.h"

namespace canter {

void mix_streams(const StreamArgs& args) {
    const KernelTable& k = kernels();
    const std::int64_t cost = args.streams * args.streams * args.width;
    for_rows(args.rows, cost, [&](std::int64_t begin, std::int64_t end) { k.mix_streams(args, begin, end); });
}

void add_to_streams(const StreamArgs& args) {
    const KernelTable& k = kernels();
    for_rows(args.rows, 2 * args.streams * args.width, [&](std::int64_t begin, std::int64_t end) { k.add_to_streams(args, begin, end); });
}

void match_streams(const StreamArgs& args) {
    const KernelTable& k = kernels();
    for_rows(args.rows, 2 * args.streams * args.width, [&](std::int64_t begin, std::int64_t end) { k.match_streams(args, begin, end); });
}

}  // namespace canter
