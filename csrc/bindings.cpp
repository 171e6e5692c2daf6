// The module canter._native: addresses and sizes in, results written through them. Its callers (canter/kernels/native)
// check types, shapes and layout; here only what a wrong value would read or write out of bounds is checked.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "bind.h"
#include "isa/dispatch.h"
#include "parallel/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace canter {
namespace {

void bind_rms_norm(Address x, Address residual, Address weight, Address out, Address total, int type, int weight_type, std::int64_t rows,
                   std::int64_t width, std::int64_t group, std::int64_t x_stride, float eps, bool plus_one, bool cast_first) {
    rms_norm({at(x), at(residual), at(weight), at(out), at(total), dtype_of(type), dtype_of(weight_type), rows, width, group, x_stride, eps,
              plus_one, cast_first});
}

void bind_gated(Address gate_up, Address out, int type, int activation, std::int64_t rows, std::int64_t width) {
    gated({at(gate_up), at(out), dtype_of(type), static_cast<Activation>(activation), rows, width});
}

void bind_pointwise(int kind, Address x, Address y, Address factors, Address out, int type, std::int64_t rows, std::int64_t width,
                    std::int64_t x_stride, std::int64_t y_stride, float a, float b) {
    pointwise({at(x), at(y), at<float>(factors), at(out), dtype_of(type), static_cast<Pointwise>(kind), rows, width, x_stride, y_stride, a,
               b});
}

void bind_layer_norm(Address x, Address weight, Address bias, Address out, int type, int weight_type, std::int64_t rows,
                     std::int64_t width, float eps) {
    layer_norm({at(x), at(weight), at(bias), at(out), dtype_of(type), dtype_of(weight_type), rows, width, eps});
}

void bind_sparse_relu(Address x, Address out, int type, std::int64_t rows, std::int64_t width, std::int64_t x_stride, float deviations) {
    sparse_relu({at(x), at(out), dtype_of(type), rows, width, x_stride, deviations});
}

void bind_mix_streams(Address x, Address coefs, Address out, int type, std::int64_t rows, std::int64_t streams, std::int64_t width,
                      float scale) {
    mix_streams({at(x), nullptr, at(coefs), at(out), dtype_of(type), rows, streams, width, 0, scale, 0.0f, 0});
}

void bind_add_to_streams(Address x, Address row, Address coefs, Address out, int type, std::int64_t rows, std::int64_t streams,
                         std::int64_t width, std::int64_t row_stride, float scale, float offset, std::int64_t first) {
    add_to_streams({at(x), at(row), at(coefs), at(out), dtype_of(type), rows, streams, width, row_stride, scale, offset, first});
}

void bind_match_streams(Address row, Address x, Address out, int type, std::int64_t rows, std::int64_t streams, std::int64_t width,
                        std::int64_t row_stride) {
    match_streams({at(x), at(row), nullptr, at(out), dtype_of(type), rows, streams, width, row_stride, 0.0f, 0.0f, 0});
}

void bind_concat(Address x, Address y, Address out, std::int64_t rows, std::int64_t x_bytes, std::int64_t y_bytes, std::int64_t x_stride,
                 std::int64_t y_stride) {
    concat({at(x), at(y), at(out), rows, x_bytes, y_bytes, x_stride, y_stride});
}

void bind_head_linear(Address x, Address weight, Address out, int type, std::int64_t rows, std::int64_t heads, std::int64_t width,
                      std::int64_t outputs, std::int64_t x_row_stride, std::int64_t x_head_stride, std::int64_t n_stride,
                      std::int64_t k_stride) {
    head_linear({at(x), at(weight), at(out), dtype_of(type), rows, heads, width, outputs, x_row_stride, x_head_stride, n_stride, k_stride});
}

void bind_softcap(Address x, Address out, int type, std::int64_t count, float cap) {
    softcap({at(x), at(out), dtype_of(type), count, cap});
}

const QuantLayout& layout_of(const std::string& type_name) {
    for (const QuantLayout& layout : kQuantLayouts) {
        if (type_name == layout.name) return layout;
    }
    throw std::invalid_argument("dequantize: unknown type " + type_name + ".");
}

void bind_dequantize(const std::string& type_name, Address data, std::int64_t num_bytes, std::int64_t num_elements, Address out,
                     int out_type) {
    const QuantLayout& layout = layout_of(type_name);
    if (num_elements < 0 || num_elements % layout.elements != 0 || num_elements / layout.elements * layout.bytes != num_bytes) {
        throw std::invalid_argument("dequantize: " + std::to_string(num_bytes) + " bytes of " + type_name + " do not hold " +
                                    std::to_string(num_elements) + " elements.");
    }
    dequantize({at<std::uint8_t>(data), at(out), dtype_of(out_type), &layout, num_elements / layout.elements});
}

std::vector<std::string> quant_types() {
    std::vector<std::string> names;
    for (const QuantLayout& layout : kQuantLayouts) names.emplace_back(layout.name);
    return names;
}

}  // namespace
}  // namespace canter

NB_MODULE(_native, m) {
    using namespace canter;
    using released = nb::call_guard<nb::gil_scoped_release>;
    m.doc() = "Native kernels of Canter. Use canter.kernels, not this module.";
    m.def("isas", &supported_isas);
    m.def("isa", [] { return std::string(isa_name(active_isa())); });
    m.def("set_isa", &set_isa, "name"_a);
    m.def("default_num_threads", &default_num_threads);
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", &set_num_threads, "count"_a, released());
    m.def("quant_types", &quant_types);
    m.def("rms_norm", &bind_rms_norm, released());
    m.def("layer_norm", &bind_layer_norm, released());
    m.def("sparse_relu", &bind_sparse_relu, released());
    m.def("mix_streams", &bind_mix_streams, released());
    m.def("add_to_streams", &bind_add_to_streams, released());
    m.def("match_streams", &bind_match_streams, released());
    m.def("concat", &bind_concat, released());
    m.def("head_linear", &bind_head_linear, released());
    m.def("gated", &bind_gated, released());
    m.def("pointwise", &bind_pointwise, released());
    m.def("softcap", &bind_softcap, released());
    m.def("dequantize", &bind_dequantize, released());
    bind_attention(m);
    bind_bench(m);
    bind_gemm(m);
    bind_program(m);
    bind_recurrent(m);
    bind_sampling(m);
    active_isa();  // an unknown CANTER_ISA fails the import, not the first step
}
