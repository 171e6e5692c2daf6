#include "gemm/embed.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <stdexcept>

#include "gemm/float_table.h"
#include "isa/dispatch.h"
#include "parallel/rows.h"

namespace canter {
namespace {

void check_ids(const EmbedCall& call, std::int64_t vocab) {
    for (std::int64_t i = 0; i < call.rows; ++i) {
        if (call.ids[i] < 0 || call.ids[i] >= vocab) {
            throw std::out_of_range("embedding: token ids must be in [0, " + std::to_string(vocab) + "), got " +
                                    std::to_string(call.ids[i]) + ".");
        }
    }
}

// Rows [begin, end) of out, times a scale that has been rounded to its type.
void scale_rows(const EmbedCall& call, std::int64_t begin, std::int64_t end, std::int64_t width) {
    if (call.scale == 1.0f) return;
    kernels().scale(static_cast<char*>(call.out) + begin * width * dtype_bytes(call.type), call.type, (end - begin) * width, call.scale);
}

// Rows of a mapped table whose pages stay: at most 16 MB, as the system may map 2 MB for a row.
constexpr std::int64_t kMostMappedRows = 8;

// A later look maps pages again, from the system's cache of the file. Those that the table shares with its neighbours stay.
void give_back(const BlockTable& table) {
#if defined(__linux__)
    const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<std::uintptr_t>(table.data);
    const std::uintptr_t first = (begin + page - 1) / page * page;
    const std::uintptr_t end = (begin + static_cast<std::uintptr_t>(table.row_bytes * table.vocab)) / page * page;
    if (first < end) ::madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
#else
    static_cast<void>(table);
#endif
}

}  // namespace

BlockTable block_table(const std::string& type_name, const std::uint8_t* data, std::int64_t row_bytes, std::int64_t vocab,
                       std::int64_t width) {
    const QuantLayout* layout = nullptr;
    for (const QuantLayout& known : kQuantLayouts) {
        if (type_name == known.name) layout = &known;
    }
    if (!layout) throw std::invalid_argument("embedding: unknown type " + type_name + ".");
    if (width < 0 || width % layout->elements != 0 || row_bytes < width / layout->elements * layout->bytes) {
        throw std::invalid_argument("embedding: rows of " + std::to_string(row_bytes) + " bytes of " + type_name + " do not hold " +
                                    std::to_string(width) + " elements.");
    }
    return {layout, data, row_bytes, vocab, width};
}

void known_ids(const std::int64_t* ids, std::int64_t* out, std::int64_t rows, std::int64_t limit) {
    for (std::int64_t i = 0; i < rows; ++i) out[i] = ids[i] < limit ? ids[i] : 0;
}

void embedding_packed(const Matrix& matrix, const EmbedCall& call) {
    check_ids(call, matrix.outputs);
    for_rows(call.rows, matrix.width * 16, [&](std::int64_t begin, std::int64_t end) {
        float* row = call.type == DType::float32 ? nullptr : scratch_floats(Scratch::task, static_cast<std::size_t>(matrix.width));
        for (std::int64_t r = begin; r < end; ++r) {
            char* place = static_cast<char*>(call.out) + r * matrix.width * dtype_bytes(call.type);
            unpack_rows(matrix, call.ids[r], call.ids[r] + 1, row ? row : reinterpret_cast<float*>(place));
            if (row) float_kernels().store_sums({row, matrix.width, nullptr, call.type, place, call.type, matrix.width, 1, matrix.width});
        }
        scale_rows(call, begin, end, matrix.width);
    });
}

void embedding_blocks(const BlockTable& table, const EmbedCall& call, MappedRows* mapped) {
    check_ids(call, table.vocab);
    const std::int64_t blocks = table.width / table.layout->elements;
    for (std::int64_t done = 0; done < call.rows;) {
        const std::int64_t rows = mapped ? std::min(call.rows - done, kMostMappedRows - mapped->count) : call.rows;
        for_rows(rows, table.width, [&](std::int64_t begin, std::int64_t end) {
            begin += done;
            end += done;
            for (std::int64_t r = begin; r < end; ++r) {
                void* place = static_cast<char*>(call.out) + r * table.width * dtype_bytes(call.type);
                kernels().dequantize({table.data + call.ids[r] * table.row_bytes, place, call.type, table.layout, blocks}, 0, blocks);
            }
            scale_rows(call, begin, end, table.width);
        });
        done += rows;
        if (mapped && (mapped->count += rows) == kMostMappedRows) {
            give_back(table);
            mapped->count = 0;
        }
    }
}

}  // namespace canter
