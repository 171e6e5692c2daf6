#include "sampling/sampling.h"

#include <stdexcept>
#include <string>

#include "isa/isa.h"
#include "parallel/rows.h"

namespace canter {
namespace {

#if defined(CANTER_X86)
constexpr const SamplingTable* kTables[kNumIsas] = {&kScalarSampling, &kAvx2Sampling, &kAvx512Sampling, nullptr, nullptr};
#elif defined(CANTER_ARM)
constexpr const SamplingTable* kTables[kNumIsas] = {&kScalarSampling, nullptr, nullptr, nullptr, nullptr, nullptr, &kNeonSampling};
#else
constexpr const SamplingTable* kTables[kNumIsas] = {&kScalarSampling};
#endif

template <class Args>
void with_scratch(std::int64_t rows, std::int64_t vocab, const Args& args,
                  void (*kernel)(const Args&, std::int64_t, std::int64_t, float*)) {
    for_rows(rows, vocab, [&](std::int64_t begin, std::int64_t end) {
        kernel(args, begin, end, scratch_floats(Scratch::task, static_cast<std::size_t>(sampling_scratch(vocab))));
    });
}

}  // namespace

void greedy_tokens(const GreedyArgs& args) {
    const SamplingTable& k = best_table(kTables);
    for_rows(args.rows, args.vocab, [&](std::int64_t begin, std::int64_t end) { k.greedy(args, begin, end); });
}

void draw_tokens(const DrawArgs& args) { with_scratch(args.rows, args.vocab, args, best_table(kTables).draw); }

void keep_tokens(const DrawArgs& args) { with_scratch(args.rows, args.vocab, args, best_table(kTables).keep); }

void penalize(const PenaltyArgs& args) { with_scratch(args.count, args.vocab, args, best_table(kTables).penalize); }

void token_logprobs(const LogprobArgs& args) {
    for (std::int64_t i = 0; i < args.rows; ++i) {
        if (args.chosen[i] < 0 || args.chosen[i] >= args.vocab) {
            throw std::out_of_range("token_logprobs: token ids must be in [0, " + std::to_string(args.vocab) + "), got " +
                                    std::to_string(args.chosen[i]) + ".");
        }
    }
    with_scratch(args.rows, args.vocab, args, best_table(kTables).logprobs);
}

}  // namespace canter
