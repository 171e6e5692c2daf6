#include "attention/attention.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "attention/kernels.h"
#include "attention/plan.h"
#include "isa/isa.h"
#include "parallel/rows.h"

namespace canter {
namespace {

#if defined(CANTER_X86)
constexpr const AttentionKernels* kTables[kNumIsas] = {&kScalarAttention, &kAvx2Attention, &kAvx512Attention, nullptr, nullptr};
#elif defined(CANTER_ARM)
constexpr const AttentionKernels* kTables[kNumIsas] = {&kScalarAttention, nullptr, nullptr, nullptr, nullptr, nullptr, &kNeonAttention};
#else
constexpr const AttentionKernels* kTables[kNumIsas] = {&kScalarAttention};
#endif

// Multiply-adds below which a second thread is not worth waking.
constexpr std::int64_t kSerialWork = 1 << 17;

}  // namespace

void write_kv(const WriteKVArgs& args) {
    const std::int64_t slots = args.num_blocks * args.block_size;
    for (std::int64_t i = 0; i < args.rows; ++i) {
        if (args.slots[i] < -1 || args.slots[i] >= slots) {
            throw std::out_of_range("write_kv: slots must be -1 or in [0, " + std::to_string(slots) + "), got " +
                                    std::to_string(args.slots[i]) + ".");
        }
    }
    const AttentionKernels& k = best_table(kTables);
    const std::int64_t row_work = args.heads * (args.head_dim + args.value_dim);
    for_rows(args.rows, row_work, [&](std::int64_t begin, std::int64_t end) { k.write_kv(args, begin, end); });
}

void paged_attention(const AttentionArgs& args, AttentionPlan& plan) {
    const AttentionStep& step = plan.step();
    const std::int64_t row_bytes = step.q_heads * step.value_dim * dtype_bytes(args.type);
    if (plan.covered() < step.rows) {
        std::memset(static_cast<char*>(args.out) + plan.covered() * row_bytes, 0,
                    static_cast<std::size_t>((step.rows - plan.covered()) * row_bytes));
    }
    const AttentionKernels& k = best_table(kTables);
    const auto scratch = static_cast<std::size_t>(k.scratch(step, plan.max_rows()));
    float* partials = scratch_floats(Scratch::caller, static_cast<std::size_t>(plan.partial_floats()));
    const auto run = [&](std::int64_t i) {
        const AttentionTask& task = plan.tasks()[static_cast<std::size_t>(i)];
        float* own = scratch_floats(Scratch::task, scratch);
        if (task.partial < 0) return k.attend(args, step, task.tile, nullptr, own);
        const SharedTile& shared = plan.shared()[static_cast<std::size_t>(task.whole)];
        const std::int64_t before = (task.tile.span_begin - shared.tile.span_begin) * partial_floats(task.tile.rows(), step.value_dim);
        k.attend(args, step, task.tile, partials + task.partial + before, own);
        if (plan.left(task.whole).fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        k.merge(args, step, shared.tile, partials + shared.partial, own);
        plan.left(task.whole).store(shared.tasks, std::memory_order_relaxed);  // for the next layer
    };
    const auto count = static_cast<std::int64_t>(plan.tasks().size());
    if (plan.work() < kSerialWork) {
        for (std::int64_t i = 0; i < count; ++i) run(i);
    } else {
        parallel_for(count, run);
    }
}

}  // namespace canter
