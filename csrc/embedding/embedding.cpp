#include "embedding/embedding.h"

#include <stdexcept>
#include <string>

#include "isa/dispatch.h"
#include "parallel/rows.h"

namespace canter {

void embedding(const EmbeddingArgs& args) {
    for (std::int64_t i = 0; i < args.rows; ++i) {
        if (args.ids[i] < 0 || args.ids[i] >= args.vocab) {
            throw std::out_of_range("embedding: token ids must be in [0, " + std::to_string(args.vocab) + "), got " + std::to_string(args.ids[i]) + ".");
        }
    }
    const KernelTable& k = kernels();
    for_rows(args.rows, args.width, [&](std::int64_t begin, std::int64_t end) { k.embedding(args, begin, end); });
}

}  // namespace canter
