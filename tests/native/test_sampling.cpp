// Choosing tokens: against plain loops, and a row alone against the same row in a batch.

#include "sampling/sampling.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "check.h"

namespace canter::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::int64_t kVocabs[] = {1, 3, 4, 16, 63, 64, 65, 130, 1000, 9001};

// Rows of logits: wide and flat ones, with equal values, and with tokens that may not follow.
Buffer<float> some_logits(Random& random, std::int64_t rows, std::int64_t vocab) {
    Buffer<float> out(rows * vocab);
    for (std::int64_t r = 0; r < rows; ++r) {
        const float scale = r % 3 == 0 ? 12.0f : r % 3 == 1 ? 2.0f : 0.05f;
        for (std::int64_t i = 0; i < vocab; ++i) {
            float x = random.uniform(scale);
            if (r % 4 == 1) x = std::round(x * 4) / 4;
            if (r % 4 == 2 && random.below(3) == 0) x = -kInf;
            out[r * vocab + i] = x;
        }
        out[r * vocab + random.below(vocab)] = scale;  // at least one is finite
    }
    return out;
}

// Ids in descending order of their values, equal ones ascending.
std::vector<std::int64_t> sorted_ids(const std::vector<float>& row) {
    std::vector<std::int64_t> ids(row.size());
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [&](std::int64_t a, std::int64_t b) { return row[std::size_t(a)] > row[std::size_t(b)]; });
    return ids;
}

std::vector<float> row_of(const Buffer<float>& logits, std::int64_t row, std::int64_t vocab, float divisor = 1.0f) {
    std::vector<float> out;
    for (std::int64_t i = 0; i < vocab; ++i) out.push_back(logits[row * vocab + i] / divisor);
    return out;
}

TEST(greedy_tokens) {
    Random random(1);
    constexpr std::int64_t rows = 9;
    std::vector<std::int64_t> vocabs(std::begin(kVocabs), std::end(kVocabs));
    vocabs.push_back(40000);  // more than one stretch
    for (const std::int64_t vocab : vocabs) {
        Buffer<float> logits = some_logits(random, rows, vocab);
        for (std::int64_t i = 0; i < vocab; ++i) logits[4 * vocab + i] = -kInf;
        logits[5 * vocab + random.below(vocab)] = std::numeric_limits<float>::quiet_NaN();
        logits[6 * vocab + random.below(vocab)] = kInf;
        for_threads([&] {
            Buffer<float> scores(rows);
            Buffer<std::int64_t> tokens(rows);
            greedy_tokens({logits.data(), scores.data(), tokens.data(), rows, vocab});
            for (std::int64_t r = 0; r < rows; ++r) {
                const std::vector<float> row = row_of(logits, r, vocab);
                const auto nan = std::find_if(row.begin(), row.end(), [](float x) { return std::isnan(x); });
                const auto best = nan != row.end() ? nan : std::max_element(row.begin(), row.end());
                CHECK(tokens[r] == best - row.begin());
                CHECK(scores[r] == *best || (std::isnan(scores[r]) && std::isnan(*best)));
            }
        });
    }
}

struct Limits {
    std::int64_t top_k;
    double top_p;
    float min_p;
};

constexpr Limits kLimits[] = {{1 << 20, 1.0, 0.0f},  {1, 1.0, 0.0f},     {5, 1.0, 0.0f},    {300, 1.0, 0.0f},   {4990, 1.0, 0.0f},
                              {1 << 20, 0.9, 0.0f},  {1 << 20, 0.3, 0.0f}, {1 << 20, 1e-9, 0.0f}, {1 << 20, 1.0, 0.1f}, {40, 0.95, 0.0f},
                              {3000, 0.999, 0.001f}, {1 << 20, 0.7, 0.3f}};

// What truncation leaves of a row of values, as the ids in descending order of which so many are kept: the least and the most
// that sums of probabilities in float32 allow.
struct Truncated {
    std::vector<std::int64_t> ids;
    std::int64_t least, most;
};

Truncated truncate(const std::vector<float>& row, const Limits& limits) {
    Truncated t{sorted_ids(row), 0, 0};
    const auto value = [&](std::int64_t place) { return row[std::size_t(t.ids[std::size_t(place)])]; };
    const float peak = value(0), floor = limits.min_p > 0 ? peak + std::log(limits.min_p) : -kInf;
    const std::int64_t vocab = static_cast<std::int64_t>(row.size());
    std::int64_t count = 0;
    while (count < vocab && value(count) > -kInf && value(count) >= floor && value(count) >= value(std::min(limits.top_k, vocab) - 1)) {
        ++count;
    }
    t.least = t.most = count;
    if (limits.top_p >= 1.0) return t;
    double total = 0, before = 0;
    for (std::int64_t i = 0; i < count; ++i) total += std::exp(static_cast<double>(value(i)) - peak);
    t.least = t.most = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        if (i == 0 || before < limits.top_p * total * (1 - 1e-5)) t.least = i + 1;
        if (i == 0 || before < limits.top_p * total * (1 + 1e-5)) t.most = i + 1;
        before += std::exp(static_cast<double>(value(i)) - peak);
    }
    return t;
}

TEST(keep_tokens) {
    Random random(2);
    constexpr std::int64_t rows = 12;
    for (const std::int64_t vocab : kVocabs) {
        const Buffer<float> logits = some_logits(random, rows, vocab);
        for (const Limits& limits : kLimits) {
            const Buffer<float> log_min_p = filled<float>(rows, limits.min_p > 0 ? std::log(limits.min_p) : -kInf);
            const std::vector<std::int64_t> top_k(rows, limits.top_k);
            const std::vector<double> top_p(rows, limits.top_p);
            const auto keep = [&](Buffer<float>& out, std::int64_t row, std::int64_t count) {
                keep_tokens({out.data() + row * vocab, nullptr, top_k.data(), top_p.data(), log_min_p.data(), nullptr, nullptr, nullptr,
                             nullptr, nullptr, count, vocab, 0});
            };
            Buffer<float> kept = logits, alone = logits;
            use_threads(4);
            keep(kept, 0, rows);
            use_threads(1);
            for (std::int64_t r = 0; r < rows; ++r) {
                keep(alone, r, 1);
                const Truncated expected = truncate(row_of(logits, r, vocab), limits);
                for (std::int64_t place = 0; place < vocab; ++place) {
                    const std::int64_t at = r * vocab + expected.ids[std::size_t(place)];
                    if (place < expected.least) CHECK(kept[at] == logits[at]);
                    else if (place >= expected.most) CHECK(kept[at] == -kInf);
                }
            }
            check_same_bits("keep_tokens, a row alone", alone.data(), kept.data(), rows * vocab);
        }
    }
}

// A token's score, as canter/kernels/reference/random.py has it.
float score_of(float value, std::int64_t seed, std::int64_t position, std::uint64_t offset, std::int32_t salt) {
    std::uint64_t key = static_cast<std::uint64_t>(position) * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(seed) + offset;
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9u;
    key = (key ^ key >> 27) * 0x94D049BB133111EBu;
    key ^= key >> 31;
    std::uint32_t x =
        ((static_cast<std::uint32_t>(salt) ^ static_cast<std::uint32_t>(key)) + static_cast<std::uint32_t>(key >> 32)) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    x = (x ^ x >> 16) * 0x9E3779B1u;
    const std::int32_t bits = static_cast<std::int32_t>(x) ^ (static_cast<std::int32_t>(x) >> 15);
    const float uniform = (static_cast<float>(bits) + 0.5f) * static_cast<float>((1.0 - 0x1p-24) * 0x1p-31);
    return value - static_cast<float>(std::log(-std::log1p(-static_cast<double>(uniform))));
}

TEST(draw_tokens) {
    Random random(3);
    constexpr std::int64_t rows = 12;
    constexpr std::uint64_t offset = 0x1234567;
    for (const std::int64_t vocab : kVocabs) {
        Buffer<float> logits = some_logits(random, rows, vocab);
        Buffer<std::int32_t> salts(vocab);
        for (std::int64_t i = 0; i < vocab; ++i) salts[i] = static_cast<std::int32_t>(random.bits());
        for (const Limits& limits : kLimits) {
            Buffer<float> temperature(rows), scores(rows), alone_score(1);
            Buffer<std::int64_t> seeds(rows), positions(rows), tokens(rows), alone_token(1);
            for (std::int64_t r = 0; r < rows; ++r) {
                temperature[r] = r % 5 == 0 ? 0.0f : 0.4f * static_cast<float>(r % 5);
                seeds[r] = static_cast<std::int64_t>(random.bits());
                positions[r] = random.below(5000);
            }
            const Buffer<float> log_min_p = filled<float>(rows, limits.min_p > 0 ? std::log(limits.min_p) : -kInf);
            const std::vector<std::int64_t> top_k(rows, limits.top_k);
            const std::vector<double> top_p(rows, limits.top_p);
            const auto draw = [&](std::int64_t row, std::int64_t count, Buffer<float>& score, Buffer<std::int64_t>& token) {
                draw_tokens({logits.data() + row * vocab, temperature.data() + row, top_k.data(), top_p.data(), log_min_p.data(),
                             seeds.data() + row, positions.data() + row, salts.data(), score.data(), token.data(), count, vocab, offset});
            };
            use_threads(4);
            draw(0, rows, scores, tokens);
            use_threads(1);
            for (std::int64_t r = 0; r < rows; ++r) {
                draw(r, 1, alone_score, alone_token);
                CHECK(alone_token[0] == tokens[r] && alone_score[0] == scores[r]);
                const bool draws = temperature[r] > 0;
                const std::vector<float> row = row_of(logits, r, vocab, draws ? temperature[r] : 1.0f);
                const Truncated kept = truncate(row, draws ? limits : Limits{1, 1.0, 0.0f});
                CHECK(scores[r] == row[std::size_t(kept.ids[0])]);
                if (!draws) {
                    CHECK(tokens[r] == kept.ids[0]);
                    continue;
                }
                // The winner among so many as are kept: whether a token at the edge is kept may depend on rounding.
                bool found = false;
                float best = -kInf;
                std::int64_t token = -1;
                for (std::int64_t place = 0; place < kept.most; ++place) {
                    const std::int64_t id = kept.ids[std::size_t(place)];
                    const float score = score_of(row[std::size_t(id)], seeds[r], positions[r], offset, salts[id]);
                    if (score > best || (score == best && id < token)) {
                        best = score;
                        token = id;
                    }
                    found |= place + 1 >= kept.least && token == tokens[r];
                }
                CHECK(found);
            }
        }
    }
}

TEST(penalize) {
    Random random(4);
    constexpr std::int64_t rows = 6, drafts = 2;
    constexpr std::int32_t in_prompt = 1 << 30;
    for (const std::int64_t vocab : kVocabs) {
        const Buffer<float> logits = some_logits(random, rows, vocab);
        Buffer<std::int32_t> counts(rows * vocab), draft_counts(rows * drafts);
        Buffer<std::int64_t> lines(rows), count_rows(rows), draft_ids(rows * drafts);
        Buffer<float> repetition(rows), frequency(rows), presence(rows);
        for (std::int64_t i = 0; i < rows * vocab; ++i) {
            if (random.below(20) == 0) counts[i] = static_cast<std::int32_t>(random.below(4)) + (random.below(2) ? in_prompt : 0);
        }
        for (std::int64_t r = 0; r < rows; ++r) {
            lines[r] = rows - 1 - r;
            count_rows[r] = (r + 2) % rows;
            repetition[r] = r % 3 == 0 ? 1.0f : r % 3 == 1 ? 1.3f : 0.7f;
            frequency[r] = r % 2 ? 0.5f : 0.0f;
            presence[r] = r % 4 == 1 ? -1.5f : 0.0f;
            for (std::int64_t d = 0; d < drafts; ++d) {
                draft_ids[r * drafts + d] = random.below(vocab);
                draft_counts[r * drafts + d] = 1;
            }
        }
        for (const std::int64_t used : {std::int64_t{0}, drafts}) {
            Buffer<float> expected = logits;
            for (std::int64_t r = 0; r < rows; ++r) {
                std::vector<std::int32_t> seen(counts.data() + count_rows[r] * vocab, counts.data() + (count_rows[r] + 1) * vocab);
                for (std::int64_t d = 0; d < used; ++d) ++seen[std::size_t(draft_ids[r * used + d])];
                for (std::int64_t i = 0; i < vocab; ++i) {
                    float& x = expected[lines[r] * vocab + i];
                    const std::int32_t times = seen[std::size_t(i)] & (in_prompt - 1);
                    if (seen[std::size_t(i)]) x = x > 0 ? x / repetition[r] : x * repetition[r];
                    if (times) x -= static_cast<float>(times) * frequency[r];
                    if (times) x -= presence[r];
                }
            }
            for_threads([&] {
                Buffer<float> found = logits;
                penalize({found.data(), lines.data(), count_rows.data(), counts.data(), repetition.data(), frequency.data(),
                          presence.data(), draft_ids.data(), draft_counts.data(), rows, vocab, used, in_prompt});
                for (std::int64_t i = 0; i < rows * vocab; ++i) CHECK(found[i] == expected[i]);
            });
        }
    }
}

TEST(token_logprobs) {
    Random random(5);
    constexpr std::int64_t rows = 8;
    for (const std::int64_t vocab : kVocabs) {
        const Buffer<float> logits = some_logits(random, rows, vocab);
        Buffer<std::int64_t> chosen(rows);
        for (std::int64_t r = 0; r < rows; ++r) chosen[r] = random.below(vocab);
        for (const std::int64_t wanted : {0, 1, 20, 700}) {
            const std::int64_t top = std::min(wanted, vocab), each = 1 + top;
            Buffer<std::int64_t> ids(rows * each), ranks(rows), alone_ids(each), alone_rank(1);
            Buffer<float> found(rows * each), alone(each);
            use_threads(4);
            token_logprobs({logits.data(), chosen.data(), ids.data(), found.data(), ranks.data(), rows, vocab, top});
            use_threads(1);
            for (std::int64_t r = 0; r < rows; ++r) {
                token_logprobs(
                    {logits.data() + r * vocab, chosen.data() + r, alone_ids.data(), alone.data(), alone_rank.data(), 1, vocab, top});
                check_same_bits("token_logprobs, a row alone", alone.data(), found.data() + r * each, each);
                const std::vector<float> row = row_of(logits, r, vocab);
                const std::vector<std::int64_t> order = sorted_ids(row);
                const float peak = row[std::size_t(order[0])], own = row[std::size_t(chosen[r])];
                double total = 0;
                for (const float x : row) total += std::exp(static_cast<double>(x) - peak);
                CHECK(ranks[r] == std::count_if(row.begin(), row.end(), [&](float x) { return x >= own; }) && alone_rank[0] == ranks[r]);
                for (std::int64_t j = 0; j < each; ++j) {
                    const std::int64_t id = j ? order[std::size_t(j - 1)] : chosen[r];
                    CHECK(ids[r * each + j] == id && alone_ids[j] == id);
                    check_close("token_logprobs", r * each + j, found[r * each + j], row[std::size_t(id)] - peak - std::log(total), 1e-6,
                                1e-5);
                }
            }
        }
    }
    const Buffer<float> logits(4);
    Buffer<std::int64_t> ids(1), ranks(1);
    Buffer<float> found(1);
    for (const std::int64_t id : {-1, 4}) {
        check_throws<std::out_of_range>("token_logprobs",
                                        [&] { token_logprobs({logits.data(), &id, ids.data(), found.data(), ranks.data(), 1, 4, 0}); });
    }
}

TEST_ONCE(edits_of_logits) {
    constexpr std::int64_t rows = 3, vocab = 7;
    for_threads([] {
        Buffer<float> logits = filled<float>(rows * vocab, 1.0f);
        const std::int64_t lines[] = {2, 0}, starts[] = {0, 2, 2}, ids[] = {6, 1};
        allow_tokens({logits.data(), lines, starts, ids, 2, rows, vocab});
        for (std::int64_t i = 0; i < rows * vocab; ++i) {
            const bool stays = i / vocab == 1 || i == 2 * vocab + 6 || i == 2 * vocab + 1;
            CHECK(logits[i] == (stays ? 1.0f : -kInf));
        }
        const std::int32_t masks[] = {1 << 6 | 1, -1};
        mask_tokens({logits.data(), lines, masks, 2, rows, vocab});
        for (std::int64_t i = 0; i < rows * vocab; ++i) {
            const bool stays = i / vocab == 1 || i == 2 * vocab + 6;
            CHECK(logits[i] == (stays ? 1.0f : -kInf));
        }
        const float values[] = {0.5f, -kInf};
        const std::int64_t one[] = {1, 1};
        add_to_tokens({logits.data(), one, ids, values, 2, rows, vocab});
        CHECK(logits[vocab + 6] == 1.5f && logits[vocab + 1] == -kInf && logits[vocab] == 1.0f);
    });
    Buffer<float> logits(rows * vocab);
    const std::int64_t starts[] = {0, 1}, good = 0, below = -1, beyond_rows = rows, beyond_vocab = vocab;
    const float value = 1.0f;
    const std::int32_t mask = 0;
    for (const std::int64_t* line : {&below, &beyond_rows}) {
        check_throws<std::out_of_range>("mask_tokens", [&] { mask_tokens({logits.data(), line, &mask, 1, rows, vocab}); });
        check_throws<std::out_of_range>("allow_tokens", [&] { allow_tokens({logits.data(), line, starts, &good, 1, rows, vocab}); });
        check_throws<std::out_of_range>("add_to_tokens", [&] { add_to_tokens({logits.data(), line, &good, &value, 1, rows, vocab}); });
    }
    for (const std::int64_t* id : {&below, &beyond_vocab}) {
        check_throws<std::out_of_range>("allow_tokens", [&] { allow_tokens({logits.data(), &good, starts, id, 1, rows, vocab}); });
        check_throws<std::out_of_range>("add_to_tokens", [&] { add_to_tokens({logits.data(), &good, id, &value, 1, rows, vocab}); });
    }
}

// One word at a time: whether it is forbidden after the known tokens, drafts and all.
bool forbids(const std::vector<std::int64_t>& prefix, std::vector<std::int32_t> known, const std::vector<std::int64_t>& drafts,
             std::int64_t first) {
    constexpr std::int64_t vocab = 10, row = 1;
    const std::int64_t width = static_cast<std::int64_t>(known.size()) + 1, longest = static_cast<std::int64_t>(prefix.size()) + 1;
    const std::int64_t length = longest - 1, num_drafts = static_cast<std::int64_t>(drafts.size()), line = 1 + num_drafts, last = 4;
    Buffer<std::int32_t> token_ids(2 * width), total_len(2);
    std::copy(known.begin(), known.end(), token_ids.data() + width);
    token_ids[2 * width - 1] = 9;  // behind what is known
    total_len[1] = width - 1;
    Buffer<std::int64_t> prefixes(longest), inputs(line + 1);
    prefixes[0] = -1;
    std::copy(prefix.begin(), prefix.end(), prefixes.data() + 1);
    std::copy(drafts.begin(), drafts.end(), inputs.data() + line + 1 - num_drafts);
    Buffer<float> logits((line + 1) * vocab);
    forbid_words({logits.data(), &line, &last, prefixes.data(), &length, &row, &first, &num_drafts, token_ids.data(), total_len.data(),
                  num_drafts ? inputs.data() : nullptr, 1, longest, 2, width, line + 1, vocab});
    for (std::int64_t i = 0; i < logits.size(); ++i) CHECK(logits[i] == 0 || (i == line * vocab + last && logits[i] == -kInf));
    return logits[line * vocab + last] != 0;
}

TEST_ONCE(forbid_words) {
    CHECK(forbids({}, {}, {}, 0));
    CHECK(forbids({7}, {1, 7}, {}, 0) && !forbids({7}, {7, 1}, {}, 0));
    CHECK(forbids({1, 7}, {1, 7}, {}, 0) && !forbids({1, 7}, {1, 7}, {}, 1));
    CHECK(!forbids({1, 7}, {7}, {}, 0));
    CHECK(forbids({1, 7, 8}, {1}, {7, 8}, 0) && forbids({8}, {1}, {7, 8}, 1) && !forbids({1, 7}, {1}, {7, 8}, 0));

    Buffer<float> logits(2 * 5);
    Buffer<std::int32_t> token_ids(3), total_len(1);
    Buffer<std::int64_t> inputs(2);
    struct Word {
        std::int64_t line = 1, last = 4, prefix = 0, length = 1, row = 0, first = 0, drafts = 0;
        std::int32_t known = 3;
    };
    const auto call = [&](const Word& w) {
        total_len[0] = w.known;
        forbid_words({logits.data(), &w.line, &w.last, &w.prefix, &w.length, &w.row, &w.first, &w.drafts, token_ids.data(),
                      total_len.data(), inputs.data(), 1, 1, 1, 3, 2, 5});
    };
    call({});
    for (const Word& wrong :
         {Word{.line = 2}, Word{.line = -1}, Word{.last = 5}, Word{.last = -1}, Word{.length = 2}, Word{.length = -1}, Word{.row = 1},
          Word{.row = -1}, Word{.first = -1}, Word{.drafts = 3}, Word{.drafts = -1}, Word{.known = 4}, Word{.known = -1}}) {
        check_throws<std::out_of_range>("forbid_words", [&] { call(wrong); });
    }
}

}  // namespace
}  // namespace canter::test
