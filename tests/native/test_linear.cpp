// Products with weights as checkpoints store them.

#include "check.h"
#include "gemm/linear.h"

namespace canter::test {
namespace {

template <class T, class W>
void check_linear(Random& random, std::int64_t rows, std::int64_t outputs, std::int64_t width, bool has_bias) {
    const Buffer<T> x = random_buffer<T>(random, rows * width);
    const Buffer<W> weight = random_buffer<W>(random, outputs * width), bias = random_buffer<W>(random, outputs);
    Buffer<T> out(rows * outputs);
    const auto call = [&](std::int64_t row, std::int64_t count, T* to) {
        linear({x.data() + row * width, dtype_of<T>, weight.data(), dtype_of<W>, has_bias ? bias.data() : nullptr, dtype_of<W>, to, count, outputs, width});
    };
    call(0, rows, out.data());
    for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t n = 0; n < outputs; ++n) {
            double sum = has_bias ? to_float(bias[n]) : 0, size = 1;
            for (std::int64_t k = 0; k < width; ++k) {
                const double product = static_cast<double>(to_float(x[r * width + k])) * to_float(weight[n * width + k]);
                sum += product;
                size += std::abs(product);
            }
            check_close("linear", r * outputs + n, to_float(out[r * outputs + n]), sum, relative_of<T>(2), 3e-6 * size);
        }
        Buffer<T> alone(outputs);
        call(r, 1, alone.data());
        check_same_bits("linear, a row alone", alone.data(), out.data() + r * outputs, outputs);
    }
}

TEST(linear) {
    Random random(30);
    for_types([&](auto t, auto w) {
        using T = decltype(t);
        using W = decltype(w);
        for (const std::int64_t width : {1, 3, 15, 17, 33, 64, 130, 770}) {
            for (const std::int64_t outputs : {1, 2, 7, 13, 33}) {
                for (const std::int64_t rows : {1, 2, 3, 4, 5, 11}) {
                    if (width <= 130 || outputs == 13) check_linear<T, W>(random, rows, outputs, width, (rows + outputs) % 2 == 0);
                }
            }
        }
        for_threads([&] { check_linear<T, W>(random, 131, 100, 40, true); });
    });
}

}  // namespace
}  // namespace canter::test
