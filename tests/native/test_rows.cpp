// Ops on rows of elements: norms, activations, soft cap, rotary embedding.

#include "activation/activation.h"
#include "check.h"
#include "heads/heads.h"
#include "norm/norm.h"
#include "rope/rotary.h"
#include "streams/streams.h"

namespace canter::test {
namespace {

// The number that storing x as T leaves.
template <class T>
double rounded(double x) {
    return to_float(from_float<T>(static_cast<float>(x)));
}

struct NormCase {
    std::int64_t rows, width;
    bool residual, plus_one, cast_first;
};

template <class T, class W>
void check_norm(const NormCase& c, const Buffer<T>& x, const Buffer<T>& residual, const Buffer<W>& weight, float eps) {
    Buffer<T> out(x.size()), total(x.size());
    const auto call = [&](std::int64_t row, std::int64_t rows, T* to, T* sums) {
        const std::int64_t at = row * c.width;
        rms_norm({x.data() + at, c.residual ? residual.data() + at : nullptr, weight.data(), to, c.residual ? sums : nullptr, dtype_of<T>,
                  dtype_of<W>, rows, c.width, 1, c.width, eps, c.plus_one, c.cast_first});
    };
    call(0, c.rows, out.data(), total.data());
    for (std::int64_t r = 0; r < c.rows; ++r) {
        double squares = 0;
        std::vector<double> values;
        for (std::int64_t i = r * c.width; i < (r + 1) * c.width; ++i) {
            double value = to_float(x[i]);
            if (c.residual) {
                value = rounded<T>(value + to_float(residual[i]));
                check_same_bits("total", &total[i], std::vector<T>{from_float<T>(to_float(x[i]) + to_float(residual[i]))}.data(),
                                std::isnan(value) ? 0 : 1);
            }
            values.push_back(value);
            squares += static_cast<double>(static_cast<float>(value * value));  // float32 overflows, and so may the sum
        }
        const double factor = 1.0 / std::sqrt(static_cast<float>(squares) / static_cast<double>(c.width) + eps);
        for (std::int64_t i = 0; i < c.width; ++i) {
            const double w = to_float(weight[i]) + (c.plus_one ? 1.0 : 0.0), normed = values[static_cast<std::size_t>(i)] * factor;
            const double expected = c.cast_first ? rounded<T>(normed) * rounded<W>(w) : normed * w;
            const double twice = c.cast_first ? relative_of<T>(0) + relative_of<W>(0) : 0;  // a rounding may fall to the other side
            check_close("rms_norm", r * c.width + i, to_float(out[r * c.width + i]), expected, relative_of<T>(16) + 2 * twice, 1e-37);
        }
        Buffer<T> alone(c.width), sums(c.width);
        call(r, 1, alone.data(), sums.data());
        check_same_bits("rms_norm, a row alone", alone.data(), out.data() + r * c.width, c.width);
    }
}

TEST(rms_norm) {
    for_types([](auto t, auto w) {
        using T = decltype(t);
        using W = decltype(w);
        Random random(1);
        for (const std::int64_t width : kWidths) {
            for (int flags = 0; flags < 8; ++flags) {
                const NormCase c{3, width, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0};
                check_norm(c, random_buffer<T>(random, 3 * width, 3), random_buffer<T>(random, 3 * width), random_buffer<W>(random, width),
                           1e-5f);
            }
        }
        for_threads([&] {
            check_norm({200, 130, true, false, false}, random_buffer<T>(random, 26000), random_buffer<T>(random, 26000),
                       random_buffer<W>(random, 130), 0.0f);
        });
    });
}

TEST(rms_norm_of_extremes) {
    Random random(2);
    for (const float value : {0.0f, 1e-40f, 1e-20f, 1e18f, INFINITY, NAN}) {
        const Buffer<float> x = filled<float>(3 * 17, value), weight = random_buffer<float>(random, 17);
        // The squares of 1e-20 are denormal, and of 1e-40 zero: eps decides, and nothing may trap or read what it must not.
        check_norm({3, 17, false, false, false}, x, x, weight, 1e-6f);
    }
    Buffer<float> x = random_buffer<float>(random, 2 * 33);
    x[40] = INFINITY;  // one row's infinity is not another's
    Buffer<float> out(66);
    rms_norm({x.data(), nullptr, filled<float>(33, 1).data(), out.data(), nullptr, DType::float32, DType::float32, 2, 33, 1, 33, 1e-6f,
              false, false});
    for (std::int64_t i = 0; i < 33; ++i) CHECK(std::isfinite(out[i]));
    CHECK(std::isnan(out[40]) && out[41] == 0);
}

double silu(double x) { return x / (1 + std::exp(-x)); }

double gelu_by_erf(double x) { return x * std::erfc(-x / std::sqrt(2)) / 2; }

double gelu(double x) { return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

template <class T>
void check_gated(const Buffer<T>& x, std::int64_t rows, std::int64_t width, Activation activation, bool extreme) {
    Buffer<T> out(rows * width);
    gated({x.data(), out.data(), dtype_of<T>, activation, rows, width});
    for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t i = 0; i < width; ++i) {
            const double gate = to_float(x[r * 2 * width + i]), up = to_float(x[r * 2 * width + width + i]);
            const double by_gelu = activation == Activation::gelu ? gelu_by_erf(gate) : gelu(gate);
            const double activated = activation == Activation::silu ? silu(gate) : by_gelu;
            const double expected = static_cast<double>(static_cast<float>(activated)) * up;
            // Far out, e^-x times x is a number in double and gone in float32: what remains is zero, or NaN times infinity.
            if (extreme && (std::abs(activated) < 1e-30 || std::isinf(gate)) && !std::isfinite(up)) continue;
            check_close("gated", r * width + i, to_float(out[r * width + i]), expected,
                        relative_of<T>(activation == Activation::silu ? 8 : 64),
                        (activation == Activation::gelu ? 2e-6 : 1e-30) * std::max(1.0, std::abs(up)));
        }
        Buffer<T> alone(width);
        gated({x.data() + r * 2 * width, alone.data(), dtype_of<T>, activation, 1, width});
        check_same_bits("gated, a row alone", alone.data(), out.data() + r * width, width);
    }
}

TEST(gated) {
    Random random(3);
    for (const Activation activation : {Activation::silu, Activation::gelu_tanh, Activation::gelu}) {
        for (const std::int64_t width : kWidths) {
            check_gated(random_buffer<float>(random, 3 * 2 * width, 6), 3, width, activation, false);
            check_gated(random_buffer<bf16>(random, 3 * 2 * width, 6), 3, width, activation, false);
        }
        check_gated(extreme_buffer<float>(random, 2 * 3 * 500), 3, 500, activation, true);
        check_gated(extreme_buffer<bf16>(random, 2 * 3 * 500), 3, 500, activation, true);
        for_threads([&] { check_gated(random_buffer<float>(random, 2 * 100 * 130), 100, 130, activation, false); });
    }
}

TEST(concat) {
    Random random(8);
    for (const std::int64_t width : kWidths) {
        const std::int64_t rows = 5, other = 7, stride = width + 3;
        const Buffer<float> x = random_buffer<float>(random, rows * stride, 1), y = random_buffer<float>(random, rows * other, 1);
        Buffer<float> out(rows * (width + other));
        concat({x.data(), y.data(), out.data(), rows, width * 4, other * 4, stride * 4, other * 4});
        for (std::int64_t r = 0; r < rows; ++r) {
            check_same_bits("concat, x", out.data() + r * (width + other), x.data() + r * stride, width);
            check_same_bits("concat, y", out.data() + r * (width + other) + width, y.data() + r * other, other);
        }
    }
}

template <class T>
void check_head_linear(Random& random, std::int64_t width, std::int64_t outputs, bool along_inputs) {
    const std::int64_t rows = 3, heads = 2, head = width + 3, row = heads * head;
    const Buffer<T> x = random_buffer<T>(random, rows * row, 1), weight = random_buffer<T>(random, heads * outputs * width, 1);
    Buffer<T> out(rows * heads * outputs), alone(heads * outputs);
    const std::int64_t n_stride = along_inputs ? width : 1, k_stride = along_inputs ? 1 : outputs;
    head_linear({x.data(), weight.data(), out.data(), dtype_of<T>, rows, heads, width, outputs, row, head, n_stride, k_stride});
    for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t i = 0; i < heads * outputs; ++i) {
            const std::int64_t h = i / outputs, n = i % outputs;
            double sum = 0, magnitude = 0;
            for (std::int64_t k = 0; k < width; ++k) {
                const double term = static_cast<double>(to_float(x[r * row + h * head + k])) *
                                    to_float(weight[h * outputs * width + n * n_stride + k * k_stride]);
                sum += term;
                magnitude += std::abs(term);
            }
            const std::int64_t at = r * heads * outputs + i;
            check_close("head_linear", at, to_float(out[at]), sum, relative_of<T>(8), 1e-6 * magnitude);
        }
        const T* one = x.data() + r * row;
        head_linear({one, weight.data(), alone.data(), dtype_of<T>, 1, heads, width, outputs, row, head, n_stride, k_stride});
        check_same_bits("head_linear, a row alone", alone.data(), out.data() + r * heads * outputs, heads * outputs);
    }
}

TEST(head_linear) {
    Random random(9);
    for (const std::int64_t width : kWidths) {
        for (const bool along_inputs : {true, false}) {
            check_head_linear<float>(random, width, 19, along_inputs);
            check_head_linear<bf16>(random, 19, width, along_inputs);
        }
    }
}

template <class T>
void check_softcap(const Buffer<T>& x, float cap) {
    Buffer<T> out(x.size());
    softcap({x.data(), out.data(), dtype_of<T>, x.size(), cap});
    for (std::int64_t i = 0; i < x.size(); ++i) {
        check_close("softcap", i, to_float(out[i]), cap * std::tanh(static_cast<double>(to_float(x[i])) / cap), relative_of<T>(16), 1e-37);
    }
}

TEST(softcap) {
    Random random(4);
    for (const std::int64_t count : kWidths) {
        check_softcap(random_buffer<float>(random, count, 90), 30);
        check_softcap(random_buffer<bf16>(random, count, 90), 50);
    }
    check_softcap(extreme_buffer<float>(random, 700), 30);
    check_softcap(extreme_buffer<bf16>(random, 700), 30);
    for_threads([&] { check_softcap(random_buffer<float>(random, 40001, 90), 30); });
}

template <class T>
void check_rotary(Random& random, std::int64_t rows, std::int64_t q_heads, std::int64_t k_heads, std::int64_t dim, std::int64_t rot,
                  std::int64_t gap, bool interleaved = false) {
    constexpr std::int64_t max_pos = 11;
    const auto size = [&](std::int64_t heads) { return rows * heads * dim + (rows - 1) * gap; };
    const Buffer<T> q = random_buffer<T>(random, size(q_heads)), k = random_buffer<T>(random, size(k_heads));
    const Buffer<float> table = random_buffer<float>(random, max_pos * rot);
    Buffer<std::int64_t> positions(rows);
    for (std::int64_t t = 0; t < rows; ++t) positions[t] = t == rows - 1 ? max_pos - 1 : random.below(max_pos);
    Buffer<T> new_q = q, new_k = k;
    const std::int64_t q_stride = q_heads * dim + gap, k_stride = k_heads * dim + gap;
    rotary({new_q.data(), new_k.data(), dtype_of<T>, q_stride, k_stride, positions.data(), table.data(), rows, q_heads, k_heads, dim, rot,
            max_pos, interleaved});
    const auto check = [&](const Buffer<T>& before, const Buffer<T>& after, std::int64_t heads, std::int64_t stride) {
        for (std::int64_t at = 0; at < before.size(); ++at) {
            const std::int64_t t = at / stride, inside = at % stride, i = inside % dim, half = rot / 2;
            if (inside >= heads * dim || i >= rot) {  // gaps and the rest of a head stay
                check_same_bits("rotary, elsewhere", &after[at], &before[at], 1);
                continue;
            }
            const float* row = table.data() + positions[t] * rot;
            const std::int64_t pair = interleaved ? i / 2 : i % half, apart = interleaved ? 1 : half;
            const bool is_first = interleaved ? i % 2 == 0 : i < half;
            const double x = to_float(before[at]), c = row[pair], s = row[half + pair];
            const double other = to_float(before[is_first ? at + apart : at - apart]);
            const double expected = is_first ? x * c - other * s : x * c + other * s;
            check_close("rotary", at, to_float(after[at]), expected, relative_of<T>(2), 2e-7);
        }
    };
    check(q, new_q, q_heads, q_stride);
    check(k, new_k, k_heads, k_stride);
}

TEST(rotary) {
    Random random(5);
    for (const std::int64_t dim : {2, 6, 10, 32, 34, 66, 128}) {
        for (const std::int64_t rot : {std::int64_t{2}, dim / 4 * 2, dim}) {
            if (rot == 0) continue;
            check_rotary<float>(random, 3, 3, 1, dim, rot, 0);
            check_rotary<bf16>(random, 3, 2, 2, dim, rot, 5);
            check_rotary<float>(random, 3, 3, 1, dim, rot, 0, true);
            check_rotary<bf16>(random, 3, 2, 2, dim, rot, 5, true);
        }
    }
    for_threads([&] { check_rotary<float>(random, 100, 8, 2, 64, 64, 3); });
    const Buffer<std::int64_t> bad = [] {
        Buffer<std::int64_t> positions(2);
        positions[1] = 11;
        return positions;
    }();
    Buffer<float> q(8), k(8), table(44);
    check_throws<std::out_of_range>(
        "rotary", [&] { rotary({q.data(), k.data(), DType::float32, 4, 4, bad.data(), table.data(), 2, 1, 1, 4, 4, 11, false}); });
}

}  // namespace
}  // namespace canter::test
