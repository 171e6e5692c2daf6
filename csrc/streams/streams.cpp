#include "streams/streams.h"

#include <cstring>

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

void concat(const ConcatArgs& args) {
    for_rows(args.rows, (args.x_bytes + args.y_bytes) / 4, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
            char* out = static_cast<char*>(args.out) + r * (args.x_bytes + args.y_bytes);
            std::memcpy(out, static_cast<const char*>(args.x) + r * args.x_stride, static_cast<std::size_t>(args.x_bytes));
            std::memcpy(out + args.x_bytes, static_cast<const char*>(args.y) + r * args.y_stride, static_cast<std::size_t>(args.y_bytes));
        }
    });
}

}  // namespace canter
