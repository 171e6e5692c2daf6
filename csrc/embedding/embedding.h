// Rows of a table.
#pragma once

#include <cstdint>

#include "common.h"

namespace canter {

struct EmbeddingArgs {
    const std::int64_t* ids;  // [T]
    const void* weight;  // [V, H]
    void* out;  // [T, H]
    DType type;
    std::int64_t rows, vocab, width;
    float scale;  // already rounded to the type
};

// Throws std::out_of_range for an id outside [0, V).
void embedding(const EmbeddingArgs& args);

}  // namespace canter
