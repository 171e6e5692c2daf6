// Instructions for rotary embedding, cache writing and paged attention.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <optional>

#include "attention/attention.h"
#include "attention/plan.h"
#include "program/instructions.h"
#include "rope/rotary.h"

namespace nb = nanobind;

namespace canter {
namespace {

void add_rotary(Program& program, Operand q, Operand k, int type, std::int64_t q_stride, std::int64_t k_stride, Operand positions,
                Address cos_sin, std::int64_t q_heads, std::int64_t k_heads, std::int64_t head_dim, std::int64_t rot_dim,
                std::int64_t max_pos, bool interleaved) {
    const RotaryArgs args{nullptr, nullptr, dtype_of(type), q_stride, k_stride, nullptr, at<float>(cos_sin), 0, q_heads, k_heads, head_dim,
                          rot_dim, max_pos, interleaved};
    program.add("rotary", [=](const Frame& frame) {
        RotaryArgs now = args;
        now.q = q.at(frame);
        now.k = k.at(frame);
        now.positions = positions.at<std::int64_t>(frame);
        now.rows = frame.rows;
        rotary(now);
    });
}

void add_write_kv(Program& program, Operand k, Operand v, int type, std::int64_t k_stride, std::int64_t v_stride, Address k_cache,
                  Address v_cache, int cache_type, std::int64_t k_block_bytes, std::int64_t v_block_bytes, Address k_scale, Address v_scale,
                  std::int64_t k_scale_stride, std::int64_t v_scale_stride, Operand slots, std::int64_t heads, std::int64_t head_dim,
                  std::int64_t value_dim, std::int64_t num_blocks, std::int64_t block_size) {
    const WriteKVArgs args{nullptr, nullptr, dtype_of(type), k_stride, v_stride, {at(k_cache), k_block_bytes}, {at(v_cache), v_block_bytes},
                           static_cast<CacheType>(cache_type), {at<float>(k_scale), k_scale_stride}, {at<float>(v_scale), v_scale_stride},
                           nullptr, 0, heads, head_dim, value_dim, num_blocks, block_size};
    program.add("write_kv", [=](const Frame& frame) {
        WriteKVArgs now = args;
        now.k = k.at(frame);
        now.v = v.at(frame);
        now.slots = slots.at<std::int64_t>(frame);
        now.rows = frame.rows;
        write_kv(now);
    });
}

using SharedPlan = std::shared_ptr<AttentionPlan>;

// `requests` and `table_width` name the slots that hold these sizes.
void add_attention_plan(Program& program, SharedPlan plan, Operand block_table, Operand query_start_loc, Operand seq_lens,
                        std::optional<Operand> prompt_lens, std::int64_t requests, std::int64_t table_width, std::int64_t q_heads,
                        std::int64_t k_heads, std::int64_t head_dim, std::int64_t value_dim, std::int64_t num_blocks,
                        std::int64_t block_size, std::int64_t window, std::int64_t chunk) {
    program.add("attention_plan", [=](const Frame& frame) {
        plan->make({block_table.at<std::int32_t>(frame), query_start_loc.at<std::int32_t>(frame), seq_lens.at<std::int32_t>(frame),
                    prompt_lens ? prompt_lens->at<std::int32_t>(frame) : nullptr, frame.rows, frame.slots[requests],
                    frame.slots[table_width], q_heads, k_heads, head_dim, value_dim, num_blocks, block_size, window, chunk});
    });
}

void add_paged_attention(Program& program, SharedPlan plan, Operand q, int type, std::int64_t q_stride, Address k_cache, Address v_cache,
                         int cache_type, std::int64_t k_block_bytes, std::int64_t v_block_bytes, Address k_scale, Address v_scale,
                         std::int64_t k_scale_stride, std::int64_t v_scale_stride, Address sinks, Address slopes, Operand out, float scale,
                         float softcap, bool one_cache) {
    const AttentionArgs args{nullptr, dtype_of(type), q_stride, {at(k_cache), k_block_bytes}, {at(v_cache), v_block_bytes},
                             static_cast<CacheType>(cache_type), {at<float>(k_scale), k_scale_stride}, {at<float>(v_scale), v_scale_stride},
                             at<float>(sinks), at<float>(slopes), nullptr, scale, softcap, one_cache};
    program.add("paged_attention", [=](const Frame& frame) {
        AttentionArgs now = args;
        now.q = q.at(frame);
        now.out = out.at(frame);
        paged_attention(now, *plan);
    });
}

}  // namespace

void bind_attention_instructions(nb::class_<Program>& program) {
    program.def("rotary", &add_rotary)
        .def("write_kv", &add_write_kv)
        .def("attention_plan", &add_attention_plan)
        .def("paged_attention", &add_paged_attention);
}

}  // namespace canter
