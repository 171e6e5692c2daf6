#include "recurrent/recurrent.h"

#include <stdexcept>
#include <string>

#include "isa/dispatch.h"
#include "parallel/rows.h"

namespace canter {
namespace {

void check(const char* op, const RecurrentPlan& plan) {
    const auto refuse = [op](const std::string& what) { throw std::invalid_argument(std::string(op) + ": " + what); };
    std::int64_t row = 0, segment = 0;
    if (plan.requests > 0 && plan.segment_start[0] != 0) refuse("the first request's segments must begin at 0.");
    for (std::int64_t r = 0; r < plan.requests; ++r) {
        if (plan.read[r] >= plan.slots) refuse("slot " + std::to_string(plan.read[r]) + " of " + std::to_string(plan.slots) + ".");
        if (plan.segment_start[r + 1] < segment) refuse("segments must not go backwards.");
        for (; segment < plan.segment_start[r + 1]; ++segment) {
            if (plan.ends[segment] < row || plan.ends[segment] > plan.rows) refuse("segments must end in order and within the rows.");
            if (plan.write[segment] >= plan.slots) {
                refuse("slot " + std::to_string(plan.write[segment]) + " of " + std::to_string(plan.slots) + ".");
            }
            row = plan.ends[segment];
        }
    }
}

// A task is a tile of one request's state. `cost`: elements touched for one row of a request.
template <class F>
void for_tiles(const RecurrentPlan& plan, std::int64_t tiles, std::int64_t cost, const F& body) {
    if (plan.requests == 0) return;
    const std::int64_t rows = (plan.rows + plan.requests - 1) / plan.requests;
    for_rows(plan.requests * tiles, rows * cost / tiles + 1, body);
}

std::int64_t tiles_of(std::int64_t width) { return (width + kernels().tile_width - 1) / kernels().tile_width; }

}  // namespace

void causal_conv(const ConvArgs& args) {
    check("causal_conv", args.plan);
    const KernelTable& k = kernels();
    const auto body = [&](std::int64_t begin, std::int64_t end) { k.causal_conv(args, begin, end); };
    for_tiles(args.plan, tiles_of(args.channels), args.channels * (args.taps + 3), body);
}

void ssd_scan(const SsdArgs& args) {
    check("ssd_scan", args.plan);
    const KernelTable& k = kernels();
    const auto body = [&](std::int64_t begin, std::int64_t end) { k.ssd_scan(args, begin, end); };
    for_tiles(args.plan, args.heads * tiles_of(args.width), args.heads * args.width * args.depth, body);
}

void selective_scan(const SelectiveArgs& args) {
    check("selective_scan", args.plan);
    const KernelTable& k = kernels();
    const auto body = [&](std::int64_t begin, std::int64_t end) { k.selective_scan(args, begin, end); };
    for_tiles(args.plan, tiles_of(args.width), 8 * args.width * args.depth, body);
}

void gated_delta(const DeltaArgs& args) {
    check("gated_delta", args.plan);
    const KernelTable& k = kernels();
    const auto body = [&](std::int64_t begin, std::int64_t end) { k.gated_delta(args, begin, end); };
    for_tiles(args.plan, args.heads * tiles_of(args.width), 2 * args.heads * args.width * args.depth, body);
}

void l2_norm(const L2NormArgs& args) {
    const KernelTable& k = kernels();
    for_rows(args.rows, 2 * args.heads * args.width, [&](std::int64_t begin, std::int64_t end) { k.l2_norm(args, begin, end); });
}

void decay_gate(const DecayArgs& args) {
    const KernelTable& k = kernels();
    for_rows(args.rows, 8 * args.heads * args.width, [&](std::int64_t begin, std::int64_t end) { k.decay_gate(args, begin, end); });
}

void gated_rms_norm(const GatedNormArgs& args) {
    const KernelTable& k = kernels();
    for_rows(args.rows, 6 * args.width, [&](std::int64_t begin, std::int64_t end) { k.gated_rms_norm(args, begin, end); });
}

}  // namespace canter
