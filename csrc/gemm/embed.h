// Rows of a table that is packed, or that lies in its file as blocks.
#pragma once

#include <cstdint>
#include <string>

#include "common.h"
#include "gemm/matmul.h"
#include "quant/dequantize.h"

namespace canter {

struct EmbedCall {
    const std::int64_t* ids;  // [T]
    void* out;  // [T, H]
    DType type;
    std::int64_t rows;
    float scale;  // already rounded to the type
};

// Rows of `width` elements, `row_bytes` apart.
struct BlockTable {
    const QuantLayout* layout;
    const std::uint8_t* data;
    std::int64_t row_bytes, vocab, width;
};

// Of a table that lies in a file mapped for reading: rows looked up since its pages were last given back. The system maps what lies
// around a page too, so that a few hundred rows would bring all of a table in.
struct MappedRows {
    std::int64_t count = 0;
};

// Throws std::invalid_argument for an unknown type and for rows that do not hold so many elements.
BlockTable block_table(const std::string& type_name, const std::uint8_t* data, std::int64_t row_bytes, std::int64_t vocab,
                       std::int64_t width);

// Ids from `limit` on become 0: a table that is shorter than the vocabulary has nothing for them.
void known_ids(const std::int64_t* ids, std::int64_t* out, std::int64_t rows, std::int64_t limit);
// Throw std::out_of_range for an id outside the table.
void embedding_packed(const Matrix& matrix, const EmbedCall& call);
// `mapped`: null for a table in memory of its own. The pages of another go back whenever some rows have been looked up.
void embedding_blocks(const BlockTable& table, const EmbedCall& call, MappedRows* mapped = nullptr);

}  // namespace canter
