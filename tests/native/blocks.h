// GGUF blocks with random codes, and what they mean in double precision, written down apart from the kernels' decoders.
#pragma once

#include "check.h"

namespace canter::test {

struct BlockType {
    const char* name;
    std::int64_t elements, bytes;
    std::vector<std::int64_t> halves;  // where numbers of 16 bits lie
    void (*decode)(const std::uint8_t* block, double* out);
};

const std::vector<BlockType>& block_types();
const BlockType& block_type(const std::string& name);

double half_value(const std::uint8_t* p);

// Random bytes, with scales of moderate size.
Buffer<std::uint8_t> random_blocks(Random& random, const BlockType& type, std::int64_t count);

}  // namespace canter::test
