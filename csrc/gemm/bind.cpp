#include "bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "gemm/embed.h"
#include "gemm/format.h"
#include "gemm/matmul.h"
#include "gemm/pack_floats.h"
#include "gemm/quant/quant.h"
#include "parallel/rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace canter {
namespace {

using Part = std::tuple<std::string, Address, std::int64_t, std::int64_t, std::int64_t>;

std::vector<Weights> weights_of(const std::vector<Part>& parts) {
    std::vector<Weights> all;
    for (const auto& [format, data, outputs, width, group] : parts) {
        all.push_back({format_named(format), at<std::uint8_t>(data), outputs, width, group});
    }
    return all;
}

std::vector<std::string> formats() {
    std::vector<std::string> names;
    for (int i = 0; i < static_cast<int>(Format::count); ++i) names.emplace_back(format_name(static_cast<Format>(i)));
    return names;
}

std::int64_t packed_bytes(const std::string& format, std::int64_t outputs, std::int64_t width, std::int64_t group) {
    if (outputs < 0) throw std::invalid_argument("packed_bytes: negative number of outputs.");
    return num_panels(outputs) * panel_bytes(format_named(format), width, group);
}

void bind_pack_floats(const std::string& format, Address source, int source_type, std::int64_t row_stride, Address row_index,
                      std::int64_t outputs, std::int64_t width, Address dest) {
    pack_floats({format_named(format), at(source), static_cast<SourceType>(source_type), row_stride, at<std::int64_t>(row_index), outputs,
                 width, at<std::uint8_t>(dest)});
}

void bind_pack_blocks(const std::string& format, Address source, std::int64_t row_bytes, Address row_index, std::int64_t outputs,
                      std::int64_t width, Address dest) {
    pack_blocks(format_named(format), at(source), row_bytes, at<std::int64_t>(row_index), outputs, width, at<std::uint8_t>(dest));
}

void bind_pack_i8(Address codes, Address scales, Address row_index, std::int64_t outputs, std::int64_t width, Address dest) {
    pack_i8(at<std::int8_t>(codes), at<float>(scales), at<std::int64_t>(row_index), outputs, width, at<std::uint8_t>(dest));
}

void bind_pack_w4(Address codes, Address scales, Address zeros, Address row_index, std::int64_t outputs, std::int64_t width,
                  std::int64_t group, Address dest) {
    panel_bytes(Format::w4, width, group);  // refuses sizes that do not fit
    pack_w4(at<std::uint8_t>(codes), at<float>(scales), at<std::uint8_t>(zeros), at<std::int64_t>(row_index), outputs, width, group,
            at<std::uint8_t>(dest));
}

void bind_matmul(const Matrix& matrix, Address x, int x_type, std::int64_t x_stride, Address bias, int bias_type, Address out, int out_type,
                 std::int64_t out_stride, std::int64_t rows) {
    matmul({at(x), dtype_of(x_type), x_stride, matrix.parts.data(), static_cast<std::int64_t>(matrix.parts.size()), at(bias),
            dtype_of(bias_type), at(out), dtype_of(out_type), out_stride, rows, matrix.width});
}

void bind_unpack_rows(const Matrix& matrix, std::int64_t begin, std::int64_t end, Address out) {
    if (begin < 0 || begin > end || end > matrix.outputs) {
        throw std::invalid_argument("unpack_rows: [" + std::to_string(begin) + ", " + std::to_string(end) + ") of " +
                                    std::to_string(matrix.outputs) + ".");
    }
    for_rows(end - begin, matrix.width, [&](std::int64_t from, std::int64_t to) {
        unpack_rows(matrix, begin + from, begin + to, at<float>(out) + from * matrix.width);
    });
}

void bind_known_ids(Address ids, Address out, std::int64_t rows, std::int64_t limit) {
    known_ids(at<std::int64_t>(ids), at<std::int64_t>(out), rows, limit);
}

void bind_embedding_packed(const Matrix& matrix, Address ids, Address out, int out_type, std::int64_t rows, float scale) {
    embedding_packed(matrix, {at<std::int64_t>(ids), at(out), dtype_of(out_type), rows, scale});
}

void bind_embedding_blocks(const std::string& type_name, Address base, std::int64_t row_bytes, Address ids, Address out, int out_type,
                           std::int64_t rows, std::int64_t vocab, std::int64_t width, float scale) {
    embedding_blocks(block_table(type_name, at<std::uint8_t>(base), row_bytes, vocab, width),
                     {at<std::int64_t>(ids), at(out), dtype_of(out_type), rows, scale});
}

}  // namespace

void bind_gemm(nb::module_& m) {
    nb::class_<Matrix>(m, "Matrix")
        .def("__init__", [](Matrix* self, const std::vector<Part>& parts) { new (self) Matrix(weights_of(parts)); }, "parts"_a)
        .def_ro("outputs", &Matrix::outputs)
        .def_ro("width", &Matrix::width);
    m.def("formats", &formats);
    m.def("packed_bytes", &packed_bytes, "format"_a, "outputs"_a, "width"_a, "group"_a);
    m.def("pack_floats", &bind_pack_floats, Released());
    m.def("pack_blocks", &bind_pack_blocks, Released());
    m.def("pack_i8", &bind_pack_i8, Released());
    m.def("pack_w4", &bind_pack_w4, Released());
    m.def("unpack_rows", &bind_unpack_rows, Released());
    m.def("known_ids", &bind_known_ids, Released());
    m.def("embedding_packed", &bind_embedding_packed, Released());
    m.def("embedding_blocks", &bind_embedding_blocks, Released());
    m.def("matmul", &bind_matmul, Released());
}

}  // namespace canter
