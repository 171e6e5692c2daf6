#include "bind.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "sampling/sampling.h"
#include "step/step.h"

namespace nb = nanobind;

namespace canter {
namespace {

void bind_greedy(Address logits, Address scores, Address tokens, std::int64_t rows, std::int64_t vocab) {
    greedy_tokens({at<float>(logits), at<float>(scores), at<std::int64_t>(tokens), rows, vocab});
}

void bind_draw(Address logits, Address temperature, Address top_k, Address top_p, Address log_min_p, Address seed_keys, Address positions,
               Address salts, Address scores, Address tokens, std::int64_t rows, std::int64_t vocab, std::uint64_t stream_offset) {
    draw_tokens({at<float>(logits), at<float>(temperature), at<std::int64_t>(top_k), at<double>(top_p), at<float>(log_min_p),
                 at<std::int64_t>(seed_keys), at<std::int64_t>(positions), at<std::int32_t>(salts), at<float>(scores),
                 at<std::int64_t>(tokens), rows, vocab, stream_offset});
}

void bind_keep(Address logits, Address top_k, Address top_p, Address log_min_p, std::int64_t rows, std::int64_t vocab) {
    keep_tokens({at<float>(logits), nullptr, at<std::int64_t>(top_k), at<double>(top_p), at<float>(log_min_p), nullptr, nullptr, nullptr,
                 nullptr, nullptr, rows, vocab, 0});
}

void bind_penalize(Address logits, Address lines, Address rows, Address counts, Address repetition, Address frequency, Address presence,
                   Address draft_ids, Address draft_counts, std::int64_t count, std::int64_t vocab, std::int64_t drafts,
                   std::int32_t in_prompt) {
    penalize({at<float>(logits), at<std::int64_t>(lines), at<std::int64_t>(rows), at<std::int32_t>(counts), at<float>(repetition),
              at<float>(frequency), at<float>(presence), at<std::int64_t>(draft_ids), at<std::int32_t>(draft_counts), count, vocab, drafts,
              in_prompt});
}

void bind_allow(Address logits, Address lines, Address starts, Address ids, std::int64_t count, std::int64_t rows, std::int64_t vocab) {
    allow_tokens({at<float>(logits), at<std::int64_t>(lines), at<std::int64_t>(starts), at<std::int64_t>(ids), count, rows, vocab});
}

void bind_mask(Address logits, Address lines, Address masks, std::int64_t count, std::int64_t rows, std::int64_t vocab) {
    mask_tokens({at<float>(logits), at<std::int64_t>(lines), at<std::int32_t>(masks), count, rows, vocab});
}

void bind_add(Address logits, Address lines, Address ids, Address values, std::int64_t count, std::int64_t rows, std::int64_t vocab) {
    add_to_tokens({at<float>(logits), at<std::int64_t>(lines), at<std::int64_t>(ids), at<float>(values), count, rows, vocab});
}

void bind_forbid(Address logits, Address lines, Address last, Address prefixes, Address lengths, Address rows, Address first,
                 Address drafts, Address token_ids, Address total_len, Address input_ids, std::int64_t count, std::int64_t longest,
                 std::int64_t num_rows, std::int64_t width, std::int64_t num_lines, std::int64_t vocab) {
    forbid_words({at<float>(logits), at<std::int64_t>(lines), at<std::int64_t>(last), at<std::int64_t>(prefixes), at<std::int64_t>(lengths),
                  at<std::int64_t>(rows), at<std::int64_t>(first), at<std::int64_t>(drafts), at<std::int32_t>(token_ids),
                  at<std::int32_t>(total_len), at<std::int64_t>(input_ids), count, longest, num_rows, width, num_lines, vocab});
}

void bind_logprobs(Address logits, Address chosen, Address ids, Address logprobs, Address ranks, std::int64_t rows, std::int64_t vocab,
                   std::int64_t top) {
    token_logprobs({at<float>(logits), at<std::int64_t>(chosen), at<std::int64_t>(ids), at<float>(logprobs), at<std::int64_t>(ranks), rows,
                    vocab, top});
}

// A group: its table, the table's width, the block size, columns used, and where its block table and slots go.
using Group = std::tuple<Address, std::int64_t, std::int64_t, std::int64_t, Address, Address>;

// `host`: [rows | num_tokens | num_logits | num_drafts], each [B].
void bind_gather(Address token_ids, Address total_len, Address num_computed, Address table_drafts, std::int64_t width,
                 std::int64_t max_drafts, std::int64_t max_rows, Address host, Address drafts, std::int64_t requests, Address out_ids,
                 Address positions, Address logits_indices, Address logit_positions, Address logit_rows, Address query_start_loc,
                 Address seq_lens, const std::vector<Group>& groups) {
    const std::int64_t* h = at<std::int64_t>(host);
    GatherArgs args{{at<std::int32_t>(token_ids), at<std::int32_t>(total_len), at<std::int32_t>(num_computed),
                     at<std::int64_t>(table_drafts), width, max_drafts},
                    h, h + requests, h + 2 * requests, h + 3 * requests, at<std::int64_t>(drafts), requests, at<std::int64_t>(out_ids),
                    at<std::int64_t>(positions), at<std::int64_t>(logits_indices), at<std::int64_t>(logit_positions),
                    at<std::int64_t>(logit_rows), at<std::int32_t>(query_start_loc), at<std::int32_t>(seq_lens), {}};
    for (const auto& [table, table_width, block_size, used, block_table, slots] : groups) {
        args.groups.push_back(
            {at<std::int32_t>(table), table_width, block_size, used, at<std::int32_t>(block_table), at<std::int64_t>(slots)});
    }
    gather_step(args, max_rows);
}

void bind_advance(Address token_ids, Address total_len, Address num_computed, std::int64_t width, Address host, Address sampled,
                  Address inputs, Address accepted, Address num_accepted, std::int64_t requests, std::int64_t accepted_width) {
    const std::int64_t* h = at<std::int64_t>(host);
    advance_step({{at<std::int32_t>(token_ids), at<std::int32_t>(total_len), at<std::int32_t>(num_computed), nullptr, width, 0}, h,
                  h + requests, h + 2 * requests, at<std::int64_t>(sampled), at<std::int64_t>(accepted), at<std::int64_t>(num_accepted),
                  at<std::int64_t>(inputs), requests, accepted_width});
}

}  // namespace

void bind_sampling(nb::module_& m) {
    m.def("greedy_tokens", &bind_greedy, Released());
    m.def("draw_tokens", &bind_draw, Released());
    m.def("keep_tokens", &bind_keep, Released());
    m.def("penalize", &bind_penalize, Released());
    m.def("allow_tokens", &bind_allow, Released());
    m.def("mask_tokens", &bind_mask, Released());
    m.def("token_logprobs", &bind_logprobs, Released());
    m.attr("MAX_TOP_LOGPROBS") = kMaxTop;
    // Short: giving the interpreter away and taking it back would cost more than they do.
    m.def("add_to_tokens", &bind_add);
    m.def("forbid_words", &bind_forbid);
    m.def("gather_step", &bind_gather);
    m.def("advance_step", &bind_advance);
}

}  // namespace canter
