// Instructions for packed weights.

#include "gemm/embed.h"
#include "gemm/matmul.h"
#include "program/instructions.h"

namespace nb = nanobind;

namespace canter {
namespace {

// The matrix is copied: a few words a part. Its memory is the caller's.
void add_matmul(Program& program, const Matrix& matrix, Operand x, int x_type, std::int64_t x_stride, Address bias, int bias_type,
                Operand out, int out_type) {
    program.add("linear", [=](const Frame& frame) {
        matmul({x.at(frame), dtype_of(x_type), x_stride, matrix.parts.data(), static_cast<std::int64_t>(matrix.parts.size()), at(bias),
                dtype_of(bias_type), out.at(frame), dtype_of(out_type), matrix.outputs, frame.rows, matrix.width});
    });
}

void add_known_ids(Program& program, Operand ids, Operand out, std::int64_t limit) {
    program.add("known_ids", [=](const Frame& frame) {
        known_ids(ids.at<std::int64_t>(frame), out.at<std::int64_t>(frame), frame.rows, limit);
    });
}

void add_embedding_packed(Program& program, const Matrix& matrix, Operand ids, Operand out, int out_type, float scale) {
    program.add("embedding", [=](const Frame& frame) {
        embedding_packed(matrix, {ids.at<std::int64_t>(frame), out.at(frame), dtype_of(out_type), frame.rows, scale});
    });
}

void add_embedding_blocks(Program& program, const std::string& type_name, Address data, std::int64_t row_bytes, std::int64_t vocab,
                          std::int64_t width, bool is_mapped, Operand ids, Operand out, int out_type, float scale) {
    const BlockTable table = block_table(type_name, at<std::uint8_t>(data), row_bytes, vocab, width);
    program.add("embedding", [=, mapped = MappedRows{}](const Frame& frame) mutable {
        const EmbedCall call{ids.at<std::int64_t>(frame), out.at(frame), dtype_of(out_type), frame.rows, scale};
        embedding_blocks(table, call, is_mapped ? &mapped : nullptr);
    });
}

}  // namespace

void bind_packed_instructions(nb::class_<Program>& program) {
    program.def("matmul", &add_matmul)
        .def("known_ids", &add_known_ids)
        .def("embedding_packed", &add_embedding_packed)
        .def("embedding_blocks", &add_embedding_blocks);
}

}  // namespace canter
