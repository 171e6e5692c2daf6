// The module canter._native: addresses and sizes in, results written through them. Its callers (canter/kernels/native)
// check types, shapes and layout; here only what a wrong value would read or write out of bounds is checked.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "isa/dispatch.h"
#include "parallel/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace canter {
namespace {

using Address = std::uintptr_t;

template <class T = void>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

DType dtype_of(int code) { return static_cast<DType>(code); }

void bind_linear(Address x, int x_type, Address weight, int weight_type, Address bias, int bias_type, Address out, std::int64_t rows,
                 std::int64_t outputs, std::int64_t width) {
    linear({at(x), dtype_of(x_type), at(weight), dtype_of(weight_type), at(bias), dtype_of(bias_type), at(out), rows, outputs, width});
}

void bind_embedding(Address ids, Address weight, Address out, int type, std::int64_t rows, std::int64_t vocab, std::int64_t width, float scale) {
    embedding({at<std::int64_t>(ids), at(weight), at(out), dtype_of(type), rows, vocab, width, scale});
}

void bind_rms_norm(Address x, Address residual, Address weight, Address out, Address total, int type, int weight_type, std::int64_t rows,
                   std::int64_t width, float eps, bool plus_one, bool cast_first) {
    rms_norm({at(x), at(residual), at(weight), at(out), at(total), dtype_of(type), dtype_of(weight_type), rows, width, eps, plus_one, cast_first});
}

void bind_gated(Address gate_up, Address out, int type, int activation, std::int64_t rows, std::int64_t width) {
    gated({at(gate_up), at(out), dtype_of(type), static_cast<Activation>(activation), rows, width});
}

void bind_softcap(Address x, Address out, int type, std::int64_t count, float cap) { softcap({at(x), at(out), dtype_of(type), count, cap}); }

void bind_rotary(Address q, Address k, int type, std::int64_t q_stride, std::int64_t k_stride, Address positions, Address cos_sin,
                 std::int64_t rows, std::int64_t q_heads, std::int64_t k_heads, std::int64_t head_dim, std::int64_t rot_dim, std::int64_t max_pos) {
    rotary({at(q), at(k), dtype_of(type), q_stride, k_stride, at<std::int64_t>(positions), at<float>(cos_sin), rows, q_heads, k_heads, head_dim,
            rot_dim, max_pos});
}

void bind_write_kv(Address k, Address v, int type, std::int64_t k_stride, std::int64_t v_stride, Address k_cache, Address v_cache, int cache_type,
                   std::int64_t k_block_stride, std::int64_t v_block_stride, Address slots, std::int64_t rows, std::int64_t heads,
                   std::int64_t head_dim, std::int64_t num_blocks, std::int64_t block_size) {
    write_kv({at(k), at(v), dtype_of(type), k_stride, v_stride, {at(k_cache), k_block_stride}, {at(v_cache), v_block_stride}, dtype_of(cache_type),
              at<std::int64_t>(slots), rows, heads, head_dim, num_blocks, block_size});
}

void bind_paged_attention(Address q, int type, std::int64_t q_stride, Address k_cache, Address v_cache, int cache_type, std::int64_t k_block_stride,
                          std::int64_t v_block_stride, Address block_table, Address query_start_loc, Address seq_lens, Address out,
                          std::int64_t rows, std::int64_t requests, std::int64_t table_width, std::int64_t q_heads, std::int64_t k_heads,
                          std::int64_t head_dim, std::int64_t num_blocks, std::int64_t block_size, std::int64_t window, float scale, float softcap) {
    paged_attention({at(q), dtype_of(type), q_stride, {at(k_cache), k_block_stride}, {at(v_cache), v_block_stride}, dtype_of(cache_type),
                     at<std::int32_t>(block_table), at<std::int32_t>(query_start_loc), at<std::int32_t>(seq_lens), at(out), rows, requests, table_width,
                     q_heads, k_heads, head_dim, num_blocks, block_size, window, scale, softcap});
}

const QuantLayout& layout_of(const std::string& type_name) {
    for (const QuantLayout& layout : kQuantLayouts) {
        if (type_name == layout.name) return layout;
    }
    throw std::invalid_argument("dequantize: unknown type " + type_name + ".");
}

void bind_dequantize(const std::string& type_name, Address data, std::int64_t num_bytes, std::int64_t num_elements, Address out, int out_type) {
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
    m.def("isa", [] { return std::string(kernels().name); });
    m.def("set_isa", &set_isa, "name"_a);
    m.def("default_num_threads", &default_num_threads);
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", &set_num_threads, "count"_a, released());
    m.def("quant_types", &quant_types);
    m.def("linear", &bind_linear, released());
    m.def("embedding", &bind_embedding, released());
    m.def("rms_norm", &bind_rms_norm, released());
    m.def("gated", &bind_gated, released());
    m.def("softcap", &bind_softcap, released());
    m.def("rotary", &bind_rotary, released());
    m.def("write_kv", &bind_write_kv, released());
    m.def("paged_attention", &bind_paged_attention, released());
    m.def("dequantize", &bind_dequantize, released());
    kernels();  // an unknown CANTER_ISA fails the import, not the first step
}
