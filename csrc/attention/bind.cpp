#include "bind.h"

#include "attention/attention.h"
#include "attention/plan.h"
#include "rope/rotary.h"

namespace nb = nanobind;

namespace canter {
namespace {

void bind_rotary(Address q, Address k, int type, std::int64_t q_stride, std::int64_t k_stride, Address positions, Address cos_sin,
                 std::int64_t rows, std::int64_t q_heads, std::int64_t k_heads, std::int64_t head_dim, std::int64_t rot_dim,
                 std::int64_t max_pos, bool interleaved) {
    rotary({at(q), at(k), dtype_of(type), q_stride, k_stride, at<std::int64_t>(positions), at<float>(cos_sin), rows, q_heads, k_heads,
            head_dim, rot_dim, max_pos, interleaved});
}

void bind_write_kv(Address k, Address v, int type, std::int64_t k_stride, std::int64_t v_stride, Address k_cache, Address v_cache,
                   int cache_type, std::int64_t k_block_bytes, std::int64_t v_block_bytes, Address k_scale, Address v_scale,
                   std::int64_t k_scale_stride, std::int64_t v_scale_stride, Address slots, std::int64_t rows, std::int64_t heads,
                   std::int64_t head_dim, std::int64_t value_dim, std::int64_t num_blocks, std::int64_t block_size) {
    write_kv({at(k), at(v), dtype_of(type), k_stride, v_stride, {at(k_cache), k_block_bytes}, {at(v_cache), v_block_bytes},
              static_cast<CacheType>(cache_type), {at<float>(k_scale), k_scale_stride}, {at<float>(v_scale), v_scale_stride},
              at<std::int64_t>(slots), rows, heads, head_dim, value_dim, num_blocks, block_size});
}

void make_plan(AttentionPlan& plan, Address block_table, Address query_start_loc, Address seq_lens, Address prompt_lens,
               std::int64_t rows, std::int64_t requests, std::int64_t table_width, std::int64_t q_heads, std::int64_t k_heads,
               std::int64_t head_dim, std::int64_t value_dim, std::int64_t num_blocks, std::int64_t block_size, std::int64_t window,
               std::int64_t chunk) {
    plan.make({at<std::int32_t>(block_table), at<std::int32_t>(query_start_loc), at<std::int32_t>(seq_lens), at<std::int32_t>(prompt_lens),
               rows, requests, table_width, q_heads, k_heads, head_dim, value_dim, num_blocks, block_size, window, chunk});
}

void bind_paged_attention(AttentionPlan& plan, Address q, int type, std::int64_t q_stride, Address k_cache, Address v_cache, int cache_type,
                          std::int64_t k_block_bytes, std::int64_t v_block_bytes, Address k_scale, Address v_scale,
                          std::int64_t k_scale_stride, std::int64_t v_scale_stride, Address sinks, Address slopes, Address out,
                          float scale, float softcap, bool one_cache) {
    paged_attention({at(q), dtype_of(type), q_stride, {at(k_cache), k_block_bytes}, {at(v_cache), v_block_bytes},
                     static_cast<CacheType>(cache_type), {at<float>(k_scale), k_scale_stride}, {at<float>(v_scale), v_scale_stride},
                     at<float>(sinks), at<float>(slopes), at(out), scale, softcap, one_cache},
                    plan);
}

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<AttentionPlan>(m, "AttentionPlan")
        .def(nb::init<>())
        .def("make", &make_plan, Released())
        .def_prop_ro("num_tasks", [](const AttentionPlan& plan) { return plan.tasks().size(); });
    m.def("rotary", &bind_rotary, Released());
    m.def("write_kv", &bind_write_kv, Released());
    m.def("paged_attention", &bind_paged_attention, Released());
}

}  // namespace canter
