// Instructions for normalisation, activations, conversion and the choice of rows.

#include <nanobind/stl/optional.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "activation/activation.h"
#include "gemm/float_table.h"
#include "heads/heads.h"
#include "norm/norm.h"
#include "parallel/rows.h"
#include "program/instructions.h"
#include "streams/streams.h"

namespace nb = nanobind;

namespace canter {
namespace {

void add_rms_norm(Program& program, Operand x, std::int64_t x_stride, Address weight, Operand out, int type, int weight_type,
                  std::int64_t heads, std::int64_t width, float eps, bool plus_one, bool cast_first) {
    const NormArgs args{nullptr, nullptr, at(weight), nullptr, nullptr, dtype_of(type), dtype_of(weight_type), 0, width,
                        heads,   x_stride, eps,       plus_one, cast_first};
    program.add("rms_norm", [=](const Frame& frame) {
        NormArgs now = args;
        now.x = x.at(frame);
        now.out = out.at(frame);
        now.rows = frame.rows * heads;
        rms_norm(now);
    });
}

void add_add_rms_norm(Program& program, Operand x, Operand residual, Address weight, Operand out, Operand total, int type, int weight_type,
                      std::int64_t width, float eps, bool plus_one, bool cast_first) {
    const NormArgs args{nullptr, nullptr, at(weight), nullptr, nullptr, dtype_of(type), dtype_of(weight_type), 0, width,
                        1,       width,   eps,        plus_one, cast_first};
    program.add("add_rms_norm", [=](const Frame& frame) {
        NormArgs now = args;
        now.x = x.at(frame);
        now.residual = residual.at(frame);
        now.out = out.at(frame);
        now.total = total.at(frame);
        now.rows = frame.rows;
        rms_norm(now);
    });
}

void add_gated(Program& program, const std::string& name, Operand gate_up, Operand out, int type, int activation, std::int64_t width) {
    const GatedArgs args{nullptr, nullptr, dtype_of(type), static_cast<Activation>(activation), 0, width};
    program.add(name, [=](const Frame& frame) {
        GatedArgs now = args;
        now.gate_up = gate_up.at(frame);
        now.out = out.at(frame);
        now.rows = frame.rows;
        gated(now);
    });
}

void add_pointwise(Program& program, const std::string& name, int kind, Operand x, Operand y, Address factors, Operand out,
                   int type, std::int64_t width, std::int64_t x_stride, std::int64_t y_stride, float a, float b) {
    const PointwiseArgs args{nullptr, nullptr, at<float>(factors), nullptr, dtype_of(type), static_cast<Pointwise>(kind), 0, width,
                             x_stride, y_stride, a, b};
    program.add(name, [=](const Frame& frame) {
        PointwiseArgs now = args;
        now.x = x.at(frame);
        now.y = y.at(frame);
        now.out = out.at(frame);
        now.rows = frame.rows;
        pointwise(now);
    });
}

void add_layer_norm(Program& program, Operand x, Address weight, Address bias, Operand out, int type, int weight_type, std::int64_t width,
                    float eps) {
    const LayerNormArgs args{nullptr, at(weight), at(bias), nullptr, dtype_of(type), dtype_of(weight_type), 0, width, eps};
    program.add("layer_norm", [=](const Frame& frame) {
        LayerNormArgs now = args;
        now.x = x.at(frame);
        now.out = out.at(frame);
        now.rows = frame.rows;
        layer_norm(now);
    });
}

void add_sparse_relu(Program& program, Operand x, Operand out, int type, std::int64_t width, std::int64_t x_stride, float deviations) {
    program.add("sparse_relu", [=](const Frame& frame) {
        sparse_relu({x.at(frame), out.at(frame), dtype_of(type), frame.rows, width, x_stride, deviations});
    });
}

void add_mix_streams(Program& program, Operand x, Operand coefs, Operand out, int type, std::int64_t streams, std::int64_t width,
                     float scale) {
    program.add("mix_streams", [=](const Frame& frame) {
        mix_streams({x.at(frame), nullptr, coefs.at(frame), out.at(frame), dtype_of(type), frame.rows, streams, width, 0, scale, 0.0f, 0});
    });
}

// Without coefs: ones.
void add_add_to_streams(Program& program, Operand x, Operand row, std::optional<Operand> coefs, Operand out, int type,
                        std::int64_t streams, std::int64_t width, std::int64_t row_stride, float scale, float offset, std::int64_t first) {
    program.add("add_to_streams", [=](const Frame& frame) {
        const void* factors = coefs ? coefs->at(frame) : nullptr;
        add_to_streams({x.at(frame), row.at(frame), factors, out.at(frame), dtype_of(type), frame.rows, streams, width, row_stride, scale,
                        offset, first});
    });
}

void add_match_streams(Program& program, Operand row, Operand x, Operand out, int type, std::int64_t streams, std::int64_t width,
                       std::int64_t row_stride) {
    program.add("match_streams", [=](const Frame& frame) {
        match_streams({x.at(frame), row.at(frame), nullptr, out.at(frame), dtype_of(type), frame.rows, streams, width, row_stride, 0.0f,
                       0.0f, 0});
    });
}

// `heads`: how many pieces of x, and of y, a row has.
void add_concat(Program& program, Operand x, Operand y, Operand out, std::int64_t heads, std::int64_t x_bytes, std::int64_t y_bytes,
                std::int64_t x_stride, std::int64_t y_stride) {
    program.add("concat", [=](const Frame& frame) {
        concat({x.at(frame), y.at(frame), out.at(frame), frame.rows * heads, x_bytes, y_bytes, x_stride, y_stride});
    });
}

void add_head_linear(Program& program, Operand x, Address weight, Operand out, int type, std::int64_t heads, std::int64_t width,
                     std::int64_t outputs, std::int64_t x_row_stride, std::int64_t x_head_stride, std::int64_t n_stride,
                     std::int64_t k_stride) {
    program.add("head_linear", [=](const Frame& frame) {
        head_linear({x.at(frame), at(weight), out.at(frame), dtype_of(type), frame.rows, heads, width, outputs, x_row_stride,
                     x_head_stride, n_stride, k_stride});
    });
}

void add_softcap(Program& program, Operand x, Operand out, int type, std::int64_t width, float cap) {
    program.add("softcap", [=](const Frame& frame) { softcap({x.at(frame), out.at(frame), dtype_of(type), frame.rows * width, cap}); });
}

// bfloat16 to float32.
void add_widen(Program& program, Operand x, Operand out, std::int64_t width) {
    program.add("widen", [=](const Frame& frame) {
        const PackRowsCall call{x.at(frame), DType::bfloat16, width, width, out.at(frame), DType::float32, width, width, 0};
        for_rows(frame.rows, width, [&](std::int64_t begin, std::int64_t end) { float_kernels().pack_rows(call, begin, end); });
    });
}

// Rows `indices` of a matrix whose number of rows is in the slot `count`.
void add_gather(Program& program, Operand source, std::int64_t count, Operand indices, Operand out, std::int64_t row_bytes) {
    program.add("gather", [=](const Frame& frame) {
        const char* from = source.at<char>(frame);
        const std::int64_t* index = indices.at<std::int64_t>(frame);
        char* to = out.at<char>(frame);
        for (std::int64_t i = 0; i < frame.rows; ++i) {
            if (index[i] < 0 || index[i] >= frame.slots[count]) {
                throw std::out_of_range("gather: rows must be in [0, " + std::to_string(frame.slots[count]) + "), got " +
                                        std::to_string(index[i]) + ".");
            }
            std::memcpy(to + i * row_bytes, from + index[i] * row_bytes, static_cast<std::size_t>(row_bytes));
        }
    });
}

}  // namespace

void bind_dense_instructions(nb::class_<Program>& program) {
    program.def("rms_norm", &add_rms_norm)
        .def("add_rms_norm", &add_add_rms_norm)
        .def("gated", &add_gated)
        .def("pointwise", &add_pointwise)
        .def("layer_norm", &add_layer_norm)
        .def("sparse_relu", &add_sparse_relu)
        .def("mix_streams", &add_mix_streams)
        .def("add_to_streams", &add_add_to_streams)
        .def("match_streams", &add_match_streams)
        .def("concat", &add_concat)
        .def("head_linear", &add_head_linear)
        .def("softcap", &add_softcap)
        .def("widen", &add_widen)
        .def("gather", &add_gather);
}

}  // namespace canter
