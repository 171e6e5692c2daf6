// Instructions for rotary embedding, cache writing and paged attention.

#include "attention/attention.h"
#include "program/instructions.h"
#include "rope/rotary.h"

namespace nb = nanobind;

namespace canter {
namespace {

void add_rotary(Program& program, Operand q, Operand k, int type, std::int64_t q_stride, std::int64_t k_stride, Operand positions, Address cos_sin,
                std::int64_t q_heads, std::int64_t k_heads, std::int64_t head_dim, std::int64_t rot_dim, std::int64_t max_pos) {
    const RotaryArgs args{nullptr, nullptr, dtype_of(type), q_stride, k_stride, nullptr, at<float>(cos_sin), 0, q_heads, k_heads, head_dim,
                          rot_dim, max_pos};
    program.add("rotary", [=](const Frame& frame) {
        RotaryArgs now = args;
        now.q = q.at(frame);
        now.k = k.at(frame);
        now.positions = positions.at<std::int64_t>(frame);
        now.rows = frame.rows;
        rotary(now);
    });
}

void add_write_kv(Program& program, Operand k, Operand v, int type, std::int64_t k_stride, std::int64_t v_stride, Address k_cache, Address v_cache,
                  int cache_type, std::int64_t k_block_stride, std::int64_t v_block_stride, Operand slots, std::int64_t heads, std::int64_t head_dim,
                  std::int64_t num_blocks, std::int64_t block_size) {
    const WriteKVArgs args{nullptr,  nullptr, dtype_of(type), k_stride, v_stride, {at(k_cache), k_block_stride}, {at(v_cache), v_block_stride},
                           dtype_of(cache_type), nullptr, 0, heads, head_dim, num_blocks, block_size};
    program.add("write_kv", [=](const Frame& frame) {
        WriteKVArgs now = args;
        now.k = k.at(frame);
        now.v = v.at(frame);
        now.slots = slots.at<std::int64_t>(frame);
        now.rows = frame.rows;
        write_kv(now);
    });
}

// `requests` and `table_width` name the slots that hold these sizes.
void add_paged_attention(Program& program, Operand q, int type, std::int64_t q_stride, Address k_cache, Address v_cache, int cache_type,
                         std::int64_t k_block_stride, std::int64_t v_block_stride, Operand block_table, Operand query_start_loc, Operand seq_lens,
                         Operand out, std::int64_t requests, std::int64_t table_width, std::int64_t q_heads, std::int64_t k_heads,
                         std::int64_t head_dim, std::int64_t num_blocks, std::int64_t block_size, std::int64_t window, float scale, float softcap) {
    const AttentionArgs args{nullptr, dtype_of(type), q_stride, {at(k_cache), k_block_stride}, {at(v_cache), v_block_stride},
                             dtype_of(cache_type), nullptr, nullptr, nullptr, nullptr, 0, 0, 0, q_heads, k_heads, head_dim, num_blocks, block_size,
                             window, scale, softcap};
    program.add("paged_attention", [=](const Frame& frame) {
        AttentionArgs now = args;
        now.q = q.at(frame);
        now.block_table = block_table.at<std::int32_t>(frame);
        now.query_start_loc = query_start_loc.at<std::int32_t>(frame);
        now.seq_lens = seq_lens.at<std::int32_t>(frame);
        now.out = out.at(frame);
        now.rows = frame.rows;
        now.requests = frame.slots[requests];
        now.table_width = frame.slots[table_width];
        paged_attention(now);
    });
}

}  // namespace

void bind_attention_instructions(nb::class_<Program>& program) {
    program.def("rotary", &add_rotary).def("write_kv", &add_write_kv).def("paged_attention", &add_paged_attention);
}

}  // namespace canter
