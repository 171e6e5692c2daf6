// Recurrent layers: scans against sums in double, the same bits however a text is cut, and what stands around the scans.

#include <algorithm>
#include <limits>

#include "check.h"
#include "parallel/thread_pool.h"
#include "recurrent/recurrent.h"

namespace canter::test {
namespace {

double softplus_of(double x) { return x > 30 ? x : std::log1p(std::exp(x)); }
double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }

// One request: the rows of its segments, the slot that it reads (-1: it begins) and those that it writes (-1: not kept).
struct Text {
    std::vector<std::int32_t> segments;
    std::int32_t read;
    std::vector<std::int32_t> writes;

    std::int64_t rows() const {
        std::int64_t sum = 0;
        for (const std::int32_t n : segments) sum += n;
        return sum;
    }
};

constexpr std::int64_t kSlots = 14;

const std::vector<Text>& texts() {
    static const std::vector<Text> all = {
        {{1}, 0, {1}}, {{5}, -1, {2}},        {{1}, 3, {3}},         {{0}, 4, {5}},  {{}, 6, {}},
        {{1}, -1, {7}}, {{17, 0, 3}, 8, {9, -1, 8}}, {{1}, 10, {-1}}, {{1, 0}, 11, {-1, 12}}, {{33}, 13, {13}},
    };
    return all;
}

constexpr std::int64_t kRows = 1 + 5 + 1 + 0 + 0 + 1 + 20 + 1 + 1 + 33;

struct Plan {
    Buffer<std::int32_t> starts, ends, read, write;
    std::int64_t rows = 0;

    static std::int64_t count_segments(const std::vector<Text>& texts) {
        std::size_t count = 0;
        for (const Text& t : texts) count += t.segments.size();
        return static_cast<std::int64_t>(count);
    }
    explicit Plan(const std::vector<Text>& texts)
        : starts(static_cast<std::int64_t>(texts.size()) + 1), ends(count_segments(texts)), read(static_cast<std::int64_t>(texts.size())),
          write(count_segments(texts)) {
        std::int64_t segment = 0;
        for (std::int64_t i = 0; i < read.size(); ++i) {
            const Text& t = texts[static_cast<std::size_t>(i)];
            read[i] = t.read;
            for (std::size_t s = 0; s < t.segments.size(); ++s, ++segment) {
                rows += t.segments[s];
                ends[segment] = static_cast<std::int32_t>(rows);
                write[segment] = t.writes[s];
            }
            starts[i + 1] = static_cast<std::int32_t>(segment);
        }
    }
    RecurrentPlan native() const { return {starts.data(), ends.data(), read.data(), write.data(), read.size(), rows, kSlots}; }
};

// S: `Element`, `State`, sizes `state_size` and `out_size` of a slot and of a row; run(plan, state, first row, out), and
// step(state, row, out) for one row in double.
template <class S>
void check_scan(Random& random, const S& scan) {
    using T = typename S::Element;
    using State = typename S::State;
    const Buffer<State> before = random_buffer<State>(random, kSlots * scan.state_size);
    Buffer<State> state(before);
    Buffer<T> out = filled<T>(kRows * scan.out_size, 77);
    scan.run(Plan(texts()).native(), state.data(), 0, out.data());

    std::vector<bool> written(kSlots);
    std::int64_t row = 0;
    for (const Text& text : texts()) {
        std::vector<double> now(static_cast<std::size_t>(scan.state_size)), y(static_cast<std::size_t>(scan.out_size));
        if (text.read >= 0) {
            for (std::int64_t i = 0; i < scan.state_size; ++i) {
                now[static_cast<std::size_t>(i)] = to_float(before[text.read * scan.state_size + i]);
            }
        }
        // The same text row by row, each a step of its own.
        Buffer<State> alone(before);
        Buffer<T> once = filled<T>(scan.out_size, 77);
        std::int32_t at = text.read;
        constexpr std::int32_t own = kSlots - 1;
        for (std::size_t s = 0; s < text.segments.size(); ++s) {
            for (std::int32_t i = 0; i < text.segments[s]; ++i, ++row) {
                scan.step(now, row, y);
                for (std::int64_t j = 0; j < scan.out_size; ++j) {
                    check_close("row", j, to_float(out[row * scan.out_size + j]), y[static_cast<std::size_t>(j)],
                                std::is_same_v<T, bf16> ? 0x1p-7 : 1e-4, std::is_same_v<T, bf16> ? 0.02 : 2e-5);
                }
                const Text single{{1}, at, {own}};
                scan.run(Plan(std::vector<Text>{single}).native(), alone.data(), row, once.data());
                check_same_bits("a row alone", once.data(), out.data() + row * scan.out_size, scan.out_size);
                at = own;
            }
            if (text.writes[s] < 0) continue;
            written[static_cast<std::size_t>(text.writes[s])] = true;
            if (s + 1 < text.segments.size() && text.writes[s] == text.writes.back()) continue;  // written again later
            const State* kept = state.data() + text.writes[s] * scan.state_size;
            for (std::int64_t i = 0; i < scan.state_size; ++i) {
                check_close("state", i, to_float(kept[i]), now[static_cast<std::size_t>(i)], std::is_same_v<State, bf16> ? 0x1p-7 : 1e-4,
                            std::is_same_v<State, bf16> ? 0.02 : 2e-5);
            }
            if (at >= 0) check_same_bits("a state", alone.data() + at * scan.state_size, kept, scan.state_size);
        }
    }
    CHECK(row == kRows);
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
        if (written[static_cast<std::size_t>(slot)]) continue;
        const std::int64_t first = slot * scan.state_size;
        check_same_bits("a slot of nobody", state.data() + first, before.data() + first, scan.state_size);
    }
}

template <class T>
struct Conv {
    using Element = T;
    using State = T;
    std::int64_t channels, taps, stride, state_size, out_size;
    bool silu, gated;
    Buffer<T> x;  // with both gates behind each row
    Buffer<float> weight, bias;

    Conv(Random& random, std::int64_t channels, std::int64_t taps, bool silu, bool gated)
        : channels(channels), taps(taps), stride(3 * channels + 1), state_size((taps - 1) * channels), out_size(channels), silu(silu),
          gated(gated), x(random_buffer<T>(random, (kRows - 1) * stride + 3 * channels)),
          weight(random_buffer<float>(random, taps * channels)), bias(random_buffer<float>(random, channels)) {}

    void run(const RecurrentPlan& plan, T* state, std::int64_t row, T* out) const {
        const T* at = x.data() + row * stride;
        causal_conv({at, gated ? at + channels : nullptr, gated ? at + 2 * channels : nullptr, stride, stride, stride, weight.data(),
                     gated ? nullptr : bias.data(), state, out, dtype_of<T>, channels, taps, silu, plan});
    }
    void step(std::vector<double>& past, std::int64_t row, std::vector<double>& y) const {
        for (std::int64_t c = 0; c < channels; ++c) {
            const T* at = x.data() + row * stride + c;
            double now = to_float(at[0]);
            if (gated) now = to_float(from_float<T>(static_cast<float>(now) * to_float(at[channels])));
            double sum = gated ? 0 : bias[c];
            for (std::int64_t j = 0; j + 1 < taps; ++j) sum += past[static_cast<std::size_t>(j * channels + c)] * weight[j * channels + c];
            sum += now * weight[(taps - 1) * channels + c];
            if (silu) sum *= sigmoid_of(sum);
            y[static_cast<std::size_t>(c)] = gated ? sum * to_float(at[2 * channels]) : sum;
            for (std::int64_t j = 0; j + 2 < taps; ++j) {
                past[static_cast<std::size_t>(j * channels + c)] = past[static_cast<std::size_t>((j + 1) * channels + c)];
            }
            past[static_cast<std::size_t>((taps - 2) * channels + c)] = now;
        }
    }
};

template <class T>
struct Ssd {
    using Element = T;
    using State = float;
    std::int64_t heads, groups, depth, width, stride, state_size, out_size;
    bool constant;  // no dt: how much stays is the same for every row
    Buffer<T> x, dt;
    Buffer<float> bias, a, d;

    Ssd(Random& random, std::int64_t heads, std::int64_t groups, std::int64_t depth, std::int64_t width, bool constant)
        : heads(heads), groups(groups), depth(depth), width(width), stride(heads * width + 2 * groups * depth + 2),
          state_size(heads * depth * width), out_size(heads * width), constant(constant),
          x(random_buffer<T>(random, (kRows - 1) * stride + stride - 2)), dt(random_buffer<T>(random, kRows * heads, 2)),
          bias(random_buffer<float>(random, heads)), a(random_buffer<float>(random, heads)), d(random_buffer<float>(random, heads)) {
        for (std::int64_t h = 0; h < heads; ++h) a[h] = -0.05f - std::abs(a[h]);
    }
    void run(const RecurrentPlan& plan, float* state, std::int64_t row, T* out) const {
        const T* at = x.data() + row * stride;
        const T* b = at + heads * width;
        ssd_scan({at, b, b + groups * depth, stride, stride, stride, constant ? nullptr : dt.data() + row * heads, heads,
                  constant ? nullptr : bias.data(), a.data(), constant ? nullptr : d.data(), state, out, dtype_of<T>, dtype_of<T>, heads,
                  groups, depth, width, 0.1f, 1.5f, plan});
    }
    void step(std::vector<double>& state, std::int64_t row, std::vector<double>& y) const {
        const T* at = x.data() + row * stride;
        for (std::int64_t h = 0; h < heads; ++h) {
            const T* b = at + heads * width + h / (heads / groups) * depth;
            const T* c = b + groups * depth;
            const double step = constant ? 1 : std::clamp(softplus_of(to_float(dt[row * heads + h]) + bias[h]), 0.1, 1.5);
            for (std::int64_t p = 0; p < width; ++p) {
                const double in = to_float(at[h * width + p]);
                double sum = constant ? 0 : d[h] * in;
                for (std::int64_t n = 0; n < depth; ++n) {
                    double& s = state[static_cast<std::size_t>((h * depth + n) * width + p)];
                    s = std::exp(step * a[h]) * s + step * to_float(b[n]) * in;
                    sum += to_float(c[n]) * s;
                }
                y[static_cast<std::size_t>(h * width + p)] = sum;
            }
        }
    }
};

template <class T>
struct Selective {
    using Element = T;
    using State = float;
    std::int64_t depth, width, stride, state_size, out_size;
    Buffer<T> x;  // x, dt, gate, b, c
    Buffer<float> bias, a, d;

    Selective(Random& random, std::int64_t depth, std::int64_t width)
        : depth(depth), width(width), stride(3 * width + 2 * depth), state_size(depth * width), out_size(width),
          x(random_buffer<T>(random, kRows * stride)), bias(random_buffer<float>(random, width)),
          a(random_buffer<float>(random, depth * width)), d(random_buffer<float>(random, width)) {
        for (std::int64_t i = 0; i < a.size(); ++i) a[i] = -0.05f - 3 * std::abs(a[i]);
    }
    void run(const RecurrentPlan& plan, float* state, std::int64_t row, T* out) const {
        const T *at = x.data() + row * stride, *b = at + 3 * width;
        selective_scan({at, at + width, b, b + depth, at + 2 * width, stride, stride, stride, stride, stride, bias.data(), a.data(),
                        d.data(), state, out, dtype_of<T>, depth, width, plan});
    }
    void step(std::vector<double>& state, std::int64_t row, std::vector<double>& y) const {
        const T *at = x.data() + row * stride, *b = at + 3 * width, *c = b + depth;
        for (std::int64_t i = 0; i < width; ++i) {
            const double in = to_float(at[i]), step = softplus_of(to_float(at[width + i]) + bias[i]), z = to_float(at[2 * width + i]);
            double sum = d[i] * in;
            for (std::int64_t n = 0; n < depth; ++n) {
                double& s = state[static_cast<std::size_t>(n * width + i)];
                s = std::exp(step * a[n * width + i]) * s + to_float(b[n]) * step * in;
                sum += to_float(c[n]) * s;
            }
            y[static_cast<std::size_t>(i)] = sum * z * sigmoid_of(z);
        }
    }
};

template <class T>
struct Delta {
    using Element = T;
    using State = float;
    std::int64_t heads, groups, depth, width, channels, state_size, out_size;
    Buffer<float> q, k, decay;
    Buffer<T> v, beta;

    Delta(Random& random, std::int64_t heads, std::int64_t groups, std::int64_t depth, std::int64_t width, bool each_channel)
        : heads(heads), groups(groups), depth(depth), width(width), channels(each_channel ? depth : 1),
          state_size(heads * depth * width), out_size(heads * width), q(random_buffer<float>(random, kRows * groups * depth)),
          k(random_buffer<float>(random, kRows * groups * depth)), decay(random_buffer<float>(random, kRows * heads * channels)),
          v(random_buffer<T>(random, kRows * heads * width)), beta(random_buffer<T>(random, kRows * heads)) {
        const float size = 1 / std::sqrt(static_cast<float>(depth));  // keys of at most length 1, as the rule wants
        for (std::int64_t i = 0; i < k.size(); ++i) k[i] *= size;
        for (std::int64_t i = 0; i < decay.size(); ++i) decay[i] = std::abs(decay[i]);
    }
    void run(const RecurrentPlan& plan, float* state, std::int64_t row, T* out) const {
        const std::int64_t keys = groups * depth;
        gated_delta({q.data() + row * keys, k.data() + row * keys, keys, keys, v.data() + row * heads * width, beta.data() + row * heads,
                     heads * width, heads, decay.data() + row * heads * channels, state, out, dtype_of<T>, dtype_of<T>, heads, groups,
                     depth, width, channels > 1, 1.5f, plan});
    }
    void step(std::vector<double>& state, std::int64_t row, std::vector<double>& y) const {
        for (std::int64_t h = 0; h < heads; ++h) {
            const std::int64_t key = (row * groups + h / (heads / groups)) * depth, at = row * heads + h;
            const double share = 1.5 * sigmoid_of(to_float(beta[at]));
            for (std::int64_t p = 0; p < width; ++p) {
                const auto s = [&](std::int64_t n) -> double& { return state[static_cast<std::size_t>((h * depth + n) * width + p)]; };
                double held = 0, sum = 0;
                for (std::int64_t n = 0; n < depth; ++n) {
                    s(n) *= decay[at * channels + (channels > 1 ? n : 0)];
                    held += k[key + n] * s(n);
                }
                const double u = share * (to_float(v[at * width + p]) - held);
                for (std::int64_t n = 0; n < depth; ++n) {
                    s(n) += k[key + n] * u;
                    sum += q[key + n] * s(n);
                }
                y[static_cast<std::size_t>(h * width + p)] = sum;
            }
        }
    }
};

template <class T>
void check_scans(Random& random) {
    for (const std::int64_t taps : {2, 3, 4, 8}) {
        for (const std::int64_t channels : {1, 17, 70}) check_scan(random, Conv<T>(random, channels, taps, taps != 3, taps == 3));
    }
    check_scan(random, Ssd<T>(random, 1, 1, 1, 1, false));
    check_scan(random, Ssd<T>(random, 4, 2, 7, 37, false));
    check_scan(random, Ssd<T>(random, 2, 1, 12, 80, true));
    check_scan(random, Selective<T>(random, 1, 1));
    check_scan(random, Selective<T>(random, 6, 75));
    for (const bool each_channel : {false, true}) {
        check_scan(random, Delta<T>(random, 1, 1, 2, 3, each_channel));
        check_scan(random, Delta<T>(random, 4, 2, 15, 37, each_channel));
        check_scan(random, Delta<T>(random, 2, 2, 18, 72, each_channel));
    }
}

TEST(recurrent_scans) {
    Random random(20);
    for_threads([&] {
        check_scans<float>(random);
        check_scans<bf16>(random);
    });
}

// More columns than a single row works on together, shared among threads in the middle of a head.
TEST(recurrent_wide_states) {
    Random random(21);
    for_threads([&] {
        check_scan(random, Ssd<float>(random, 2, 2, 3, 1100, false));
        check_scan(random, Selective<float>(random, 16, 1300));
        check_scan(random, Delta<float>(random, 1, 1, 5, 1037, true));
    });
}

template <class T>
void check_around(Random& random, std::int64_t width) {
    constexpr std::int64_t rows = 3, heads = 2;
    const std::int64_t row = heads * width, stride = row + 3;
    const Buffer<T> x = random_buffer<T>(random, (rows - 1) * stride + row, 4), z = random_buffer<T>(random, (rows - 1) * stride + row, 4);
    const Buffer<float> weight = random_buffer<float>(random, row), slopes = filled<float>(heads, -0.7f);
    Buffer<float> normed(rows * row), stays(rows * row);
    l2_norm({x.data(), normed.data(), dtype_of<T>, rows, heads, width, stride, 1e-6f, 0.5f});
    for (const float bound : {0.0f, -5.0f}) {
        decay_gate({x.data(), slopes.data(), weight.data(), stays.data(), dtype_of<T>, rows, heads, width, stride, bound});
        for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t i = 0; i < row; ++i) {
                const double y = to_float(x[r * stride + i]) + weight[i];
                const double log = bound == 0 ? static_cast<double>(-0.7f) * softplus_of(y) : bound * sigmoid_of(0.7f * y);
                check_close("decay_gate", i, stays[r * row + i], std::exp(log), 1e-5, 1e-7);
            }
        }
    }
    for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t h = 0; h < heads; ++h) {
            const T* head = x.data() + r * stride + h * width;
            double squares = 0;
            for (std::int64_t i = 0; i < width; ++i) squares += static_cast<double>(to_float(head[i])) * to_float(head[i]);
            for (std::int64_t i = 0; i < width; ++i) {
                check_close("l2_norm", i, normed[r * row + h * width + i], to_float(head[i]) / std::sqrt(squares + 1e-6) / 2, 1e-5, 1e-7);
            }
        }
    }
    for (int variant = 0; variant < 8; ++variant) {
        const bool shared = variant & 1, first = variant & 2, sigmoid = variant & 4;
        Buffer<T> out(rows * row);
        gated_rms_norm({x.data(), z.data(), stride, stride, weight.data(), out.data(), dtype_of<T>, rows, row, width, shared, first,
                        sigmoid, 1e-5f});
        for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t h = 0; h < heads; ++h) {
                const std::int64_t at = r * stride + h * width;
                const auto gate = [&](std::int64_t i) {
                    const double y = to_float(z[at + i]);
                    return sigmoid ? sigmoid_of(y) : y * sigmoid_of(y);
                };
                const auto value = [&](std::int64_t i) { return to_float(x[at + i]) * (first ? gate(i) : 1); };
                double squares = 0;
                for (std::int64_t i = 0; i < width; ++i) squares += value(i) * value(i);
                for (std::int64_t i = 0; i < width; ++i) {
                    const double scale = weight[shared ? i : h * width + i] / std::sqrt(squares / static_cast<double>(width) + 1e-5);
                    const double expected = value(i) * scale * (first ? 1 : gate(i));
                    check_close("gated_rms_norm", i, to_float(out[r * row + h * width + i]), expected, relative_of<T>(128), 1e-6);
                }
            }
        }
    }
}

TEST(recurrent_norms_and_gates) {
    Random random(22);
    for (const std::int64_t width : kWidths) {
        check_around<float>(random, width);
        check_around<bf16>(random, width);
    }
}

TEST(recurrent_refusals) {
    Random random(23);
    const Selective<float> scan(random, 2, 3);
    Buffer<float> state(kSlots * scan.state_size), out(kRows * scan.out_size);
    const auto refuses = [&](const char* what, const Plan& plan) {
        check_throws<std::invalid_argument>(what, [&] { scan.run(plan.native(), state.data(), 0, out.data()); });
    };
    refuses("reading a slot that is not there", Plan(std::vector<Text>{{{1}, kSlots, {0}}}));
    refuses("writing a slot that is not there", Plan(std::vector<Text>{{{1}, 0, {kSlots}}}));
    Plan backwards(std::vector<Text>{{{2, 1}, 0, {1, 2}}});
    std::swap(backwards.ends[0], backwards.ends[1]);
    refuses("segments that end backwards", backwards);
    Plan beyond(std::vector<Text>{{{2}, 0, {1}}});
    beyond.rows = 1;
    refuses("segments beyond the rows", beyond);
    Plan late(std::vector<Text>{{{1}, 0, {1}}, {{1}, 2, {3}}});
    late.starts[0] = 1;
    refuses("a first request that begins late", late);
}

}  // namespace
}  // namespace canter::test
