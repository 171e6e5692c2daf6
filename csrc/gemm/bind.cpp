#include "bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "gemm/float_table.h"
#include "gemm/format.h"
#include "gemm/linear.h"
#include "gemm/matmul.h"
#include "gemm/pack_floats.h"
#include "gemm/quant/quant.h"
#include "isa/dispatch.h"
#include "parallel/rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace canter {
namespace {

void bind_linear(Address x, int x_type, Address weight, int weight_type, Address bias, int bias_type, Address out, std::int64_t rows,
                 std::int64_t outputs, std::int64_t width) {
    linear({at(x), dtype_of(x_type), at(weight), dtype_of(weight_type), at(bias), dtype_of(bias_type), at(out), rows, outputs, width});
}

using Part = std::tuple<std::string, Address, std::int64_t, std::int64_t, std::int64_t>;

std::vector<Weights> weights_of(const std::vector<Part>& parts) {
    std::vector<Weights> all;
    for (const auto& [format, data, outputs, width, group] : parts) all.push_back({format_named(format), at<std::uint8_t>(data), outputs, width, group});
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

void bind_pack_floats(const std::string& format, Address source, int source_type, std::int64_t row_stride, Address row_index, std::int64_t outputs,
                      std::int64_t width, Address dest) {
    pack_floats({format_named(format), at(source), static_cast<SourceType>(source_type), row_stride, at<std::int64_t>(row_index), outputs, width,
                 at<std::uint8_t>(dest)});
}

void bind_pack_blocks(const std::string& format, Address source, std::int64_t row_bytes, Address row_index, std::int64_t outputs, std::int64_t width,
                      Address dest) {
    pack_blocks(format_named(format), at(source), row_bytes, at<std::int64_t>(row_index), outputs, width, at<std::uint8_t>(dest));
}

void bind_pack_i8(Address codes, Address scales, Address row_index, std::int64_t outputs, std::int64_t width, Address dest) {
    pack_i8(at<std::int8_t>(codes), at<float>(scales), at<std::int64_t>(row_index), outputs, width, at<std::uint8_t>(dest));
}

void bind_pack_w4(Address codes, Address scales, Address zeros, Address row_index, std::int64_t outputs, std::int64_t width, std::int64_t group,
                  Address dest) {
    panel_bytes(Format::w4, width, group);  // refuses sizes that do not fit
    pack_w4(at<std::uint8_t>(codes), at<float>(scales), at<std::uint8_t>(zeros), at<std::int64_t>(row_index), outputs, width, group,
            at<std::uint8_t>(dest));
}

void bind_matmul(const Matrix& matrix, Address x, int x_type, std::int64_t x_stride, Address bias, int bias_type, Address out, int out_type,
                 std::int64_t out_stride, std::int64_t rows) {
    matmul({at(x), dtype_of(x_type), x_stride, matrix.parts.data(), static_cast<std::int64_t>(matrix.parts.size()), at(bias), dtype_of(bias_type),
            at(out), dtype_of(out_type), out_stride, rows, matrix.width});
}

void bind_unpack_rows(const Matrix& matrix, std::int64_t begin, std::int64_t end, Address out) {
    if (begin < 0 || begin > end || end > matrix.outputs) {
        throw std::invalid_argument("unpack_rows: [" + std::to_string(begin) + ", " + std::to_string(end) + ") of " + std::to_string(matrix.outputs) + ".");
    }
    for_rows(end - begin, matrix.width, [&](std::int64_t from, std::int64_t to) {
        unpack_rows(matrix, begin + from, begin + to, at<float>(out) + from * matrix.width);
    });
}

void check_ids(const std::int64_t* ids, std::int64_t rows, std::int64_t vocab) {
    for (std::int64_t i = 0; i < rows; ++i) {
        if (ids[i] < 0 || ids[i] >= vocab) {
            throw std::out_of_range("embedding: token ids must be in [0, " + std::to_string(vocab) + "), got " + std::to_string(ids[i]) + ".");
        }
    }
}

// Rows [begin, end) of out, times a scale that has been rounded to its type.
void scale_rows(void* out, DType type, std::int64_t begin, std::int64_t end, std::int64_t width, float scale) {
    if (scale == 1.0f) return;
    const std::int64_t zero = 0;
    for (std::int64_t r = begin; r < end; ++r) {
        char* row = static_cast<char*>(out) + r * width * dtype_bytes(type);
        kernels().embedding({&zero, row, row, type, 1, 1, width, scale}, 0, 1);
    }
}

void embedding_packed(const Matrix& matrix, Address ids, Address out, int out_type, std::int64_t rows, float scale) {
    const auto* tokens = at<std::int64_t>(ids);
    check_ids(tokens, rows, matrix.outputs);
    const DType type = dtype_of(out_type);
    for_rows(rows, matrix.width * 16, [&](std::int64_t begin, std::int64_t end) {
        float* row = type == DType::float32 ? nullptr : scratch_floats(Scratch::task, static_cast<std::size_t>(matrix.width));
        for (std::int64_t r = begin; r < end; ++r) {
            char* place = at<char>(out) + r * matrix.width * dtype_bytes(type);
            unpack_rows(matrix, tokens[r], tokens[r] + 1, row ? row : reinterpret_cast<float*>(place));
            if (row) float_kernels().store_sums({row, matrix.width, nullptr, type, place, type, matrix.width, 1, matrix.width});
        }
        scale_rows(at(out), type, begin, end, matrix.width, scale);
    });
}

void embedding_blocks(const std::string& type_name, Address base, std::int64_t row_bytes, Address ids, Address out, int out_type, std::int64_t rows,
                      std::int64_t vocab, std::int64_t width, float scale) {
    const QuantLayout* layout = nullptr;
    for (const QuantLayout& known : kQuantLayouts) {
        if (type_name == known.name) layout = &known;
    }
    if (!layout) throw std::invalid_argument("embedding: unknown type " + type_name + ".");
    if (width < 0 || width % layout->elements != 0 || row_bytes < width / layout->elements * layout->bytes) {
        throw std::invalid_argument("embedding: rows of " + std::to_string(row_bytes) + " bytes of " + type_name + " do not hold " +
                                    std::to_string(width) + " elements.");
    }
    const auto* tokens = at<std::int64_t>(ids);
    check_ids(tokens, rows, vocab);
    const DType type = dtype_of(out_type);
    const std::int64_t blocks = width / layout->elements;
    for_rows(rows, width, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
            void* place = at<char>(out) + r * width * dtype_bytes(type);
            kernels().dequantize({at<std::uint8_t>(base) + tokens[r] * row_bytes, place, type, layout, blocks}, 0, blocks);
        }
        scale_rows(at(out), type, begin, end, width, scale);
    });
}

}  // namespace

void bind_gemm(nb::module_& m) {
    m.def("linear", &bind_linear, Released());
    nb::class_<Matrix>(m, "Matrix")
        .def("__init__", [](Matrix* self, const std::vector<Part>& parts) { new (self) Matrix(weights_of(parts)); }, "parts"_a)
        .def_ro("outputs", &Matrix::outputs)
        .def_ro("width", &Matrix::width);
    m.def("formats", &formats);
    m.def("width_multiple", [](const std::string& format) { return width_multiple(format_named(format)); }, "format"_a);
    m.def("packed_bytes", &packed_bytes, "format"_a, "outputs"_a, "width"_a, "group"_a);
    m.def("pack_floats", &bind_pack_floats, Released());
    m.def("pack_blocks", &bind_pack_blocks, Released());
    m.def("pack_i8", &bind_pack_i8, Released());
    m.def("pack_w4", &bind_pack_w4, Released());
    m.def("unpack_rows", &bind_unpack_rows, Released());
    m.def("embedding_packed", &embedding_packed, Released());
    m.def("embedding_blocks", &embedding_blocks, Released());
    m.def("matmul", &bind_matmul, Released());
}

}  // namespace canter
