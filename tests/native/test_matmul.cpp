// Packed weights: packing, unpacking, products and look-ups, for every format.

#include <cstdlib>

#include "blocks.h"
#include "gemm/embed.h"
#include "gemm/format.h"
#include "gemm/matmul.h"
#include "gemm/pack_floats.h"
#include "gemm/quant/quant.h"
#include "isa/isa.h"

namespace canter::test {
namespace {

// Aligned as packed weights must be, and of exact size.
class Panels {
public:
    explicit Panels(std::int64_t bytes) {
        if (::posix_memalign(&data_, 64, static_cast<std::size_t>(bytes)) != 0) fail("no memory");
        std::memset(data_, 0xee, static_cast<std::size_t>(bytes));
    }
    Panels(Panels&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
    Panels(const Panels&) = delete;
    ~Panels() { std::free(data_); }
    std::uint8_t* data() const { return static_cast<std::uint8_t*>(data_); }

private:
    void* data_ = nullptr;
};

// A packed matrix, and what it stands for.
struct Packed {
    Panels panels;
    Weights weights;
    std::vector<double> values;  // [outputs, width]
};

Packed make_empty(Format format, std::int64_t outputs, std::int64_t width, std::int64_t group) {
    Panels panels(num_panels(outputs) * panel_bytes(format, width, group));
    const Weights weights{format, panels.data(), outputs, width, group};
    return {std::move(panels), weights, std::vector<double>(static_cast<std::size_t>(outputs * width))};
}

// Source rows in reverse order, which row_index turns back.
Buffer<std::int64_t> reversed(std::int64_t outputs) {
    Buffer<std::int64_t> index(outputs);
    for (std::int64_t i = 0; i < outputs; ++i) index[i] = outputs - 1 - i;
    return index;
}

template <class T>
Packed pack_float_rows(Random& random, Format format, std::int64_t outputs, std::int64_t width, bool turned) {
    const std::int64_t stride = width + 3;
    const Buffer<T> source = random_buffer<T>(random, (outputs - 1) * stride + width);
    Packed out = make_empty(format, outputs, width, 0);
    const Buffer<std::int64_t> index = reversed(outputs);
    pack_floats({format, source.data(), std::is_same_v<T, bf16> ? SourceType::bf16 : SourceType::f32, stride,
                 turned ? index.data() : nullptr, outputs, width, out.panels.data()});
    for (std::int64_t n = 0; n < outputs; ++n) {
        const T* row = source.data() + (turned ? outputs - 1 - n : n) * stride;
        std::vector<float> rounded(static_cast<std::size_t>(width));
        if (format == Format::q8_0) unpack_quant_rows(out.weights, n, n + 1, rounded.data(), width);
        for (std::int64_t k = 0; k < width; ++k) {
            double value = to_float(row[k]);
            if (format == Format::bf16) value = to_float(to_bf16(static_cast<float>(value)));
            if (format == Format::q8_0) {  // half a code away at most, and the scale is a half float; products take what was packed
                double highest = 0;
                for (std::int64_t i = k / 32 * 32; i < std::min(k / 32 * 32 + 32, width); ++i) {
                    highest = std::max(highest, std::abs(double{to_float(row[i])}));
                }
                const float found = rounded[static_cast<std::size_t>(k)];
                check_close("q8_0", n * width + k, found, value, 5e-4, 0.5001 * highest / 127 + 4e-6);
                value = found;
            }
            out.values[static_cast<std::size_t>(n * width + k)] = value;
        }
    }
    return out;
}

Packed pack_block_rows(Random& random, Format format, const char* name, std::int64_t outputs, std::int64_t width, bool turned) {
    const BlockType& type = block_type(name);
    const std::int64_t blocks = width / type.elements;
    const Buffer<std::uint8_t> source = random_blocks(random, type, outputs * blocks);
    Packed out = make_empty(format, outputs, width, 0);
    const Buffer<std::int64_t> index = reversed(outputs);
    pack_blocks(format, source.data(), blocks * type.bytes, turned ? index.data() : nullptr, outputs, width, out.panels.data());
    for (std::int64_t n = 0; n < outputs; ++n) {
        const std::uint8_t* row = source.data() + (turned ? outputs - 1 - n : n) * blocks * type.bytes;
        for (std::int64_t b = 0; b < blocks; ++b) {
            type.decode(row + b * type.bytes, &out.values[static_cast<std::size_t>(n * width + b * type.elements)]);
        }
    }
    return out;
}

Packed pack_i8_rows(Random& random, std::int64_t outputs, std::int64_t width, bool turned) {
    Buffer<std::int8_t> codes(outputs * width);
    for (std::int64_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::int8_t>(random.below(256) - 128);
    const Buffer<float> scales = random_buffer<float>(random, outputs);
    Packed out = make_empty(Format::i8, outputs, width, 0);
    const Buffer<std::int64_t> index = reversed(outputs);
    pack_i8(codes.data(), scales.data(), turned ? index.data() : nullptr, outputs, width, out.panels.data());
    for (std::int64_t n = 0; n < outputs; ++n) {
        const std::int64_t row = turned ? outputs - 1 - n : n;
        for (std::int64_t k = 0; k < width; ++k) {
            out.values[static_cast<std::size_t>(n * width + k)] = static_cast<double>(scales[row]) * codes[row * width + k];
        }
    }
    return out;
}

Packed pack_w4_rows(Random& random, std::int64_t outputs, std::int64_t width, std::int64_t group) {
    const std::int64_t groups = width / group;
    Buffer<std::uint8_t> codes(outputs * width), zeros(outputs * groups);
    for (std::int64_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(random.below(16));
    for (std::int64_t i = 0; i < zeros.size(); ++i) zeros[i] = static_cast<std::uint8_t>(random.below(17));
    const Buffer<float> scales = random_buffer<float>(random, outputs * groups);
    Packed out = make_empty(Format::w4, outputs, width, group);
    pack_w4(codes.data(), scales.data(), zeros.data(), nullptr, outputs, width, group, out.panels.data());
    for (std::int64_t i = 0; i < outputs * width; ++i) {
        const std::int64_t at = i / width * groups + i % width / group;
        out.values[static_cast<std::size_t>(i)] = static_cast<double>(scales[at]) * (codes[i] - zeros[at]);
    }
    return out;
}

void check_unpacked(const Packed& packed) {
    const Weights& w = packed.weights;
    Buffer<float> out(w.outputs * w.width);
    unpack_rows(Matrix({w}), 0, w.outputs, out.data());
    for (std::int64_t i = 0; i < out.size(); ++i) {
        check_close(format_name(w.format), i, out[i], packed.values[static_cast<std::size_t>(i)], 1e-6, 2e-5);
    }
    if (w.outputs > 2) {
        Buffer<float> middle((w.outputs - 2) * w.width);
        unpack_rows(Matrix({w}), 1, w.outputs - 1, middle.data());
        check_same_bits("unpacked from the middle", middle.data(), out.data() + w.width, middle.size());
    }
}

// Multiples of 1/64 with one of 127 among every 16 elements: int8 codes hold them exactly, and so does bfloat16.
template <class T>
Buffer<T> exact_rows(Random& random, std::int64_t rows, std::int64_t width, std::int64_t stride) {
    Buffer<T> x((rows - 1) * stride + width);
    for (std::int64_t i = 0; i < x.size(); ++i) {
        const bool last_of_run = i % stride % 16 == 15 || i % stride == width - 1;
        x[i] = from_float<T>((last_of_run ? (random.below(2) ? 127.0f : -127.0f) : static_cast<float>(random.below(255) - 127)) / 64);
    }
    return x;
}

bool is_float(Format format) { return format == Format::f32 || format == Format::bf16; }

// Products of `rows` rows against all parts, in float32 or bfloat16, with a bias or none; then each row alone.
template <class T>
void check_products(Random& random, const std::vector<const Packed*>& parts, std::int64_t rows, bool has_bias) {
    std::vector<Weights> weights;
    std::int64_t outputs = 0;
    for (const Packed* part : parts) {
        weights.push_back(part->weights);
        outputs += part->weights.outputs;
    }
    const std::int64_t width = weights[0].width, x_stride = width + 5, out_stride = outputs + 2;
    const bool floats = is_float(weights[0].format);
    const Buffer<T> x = floats ? random_buffer<T>(random, (rows - 1) * x_stride + width) : exact_rows<T>(random, rows, width, x_stride);
    const Buffer<T> bias = random_buffer<T>(random, outputs);
    Buffer<T> out = filled<T>((rows - 1) * out_stride + outputs, 77);
    const auto multiply = [&](std::int64_t row, std::int64_t count, T* to, std::int64_t stride) {
        matmul({x.data() + row * x_stride, dtype_of<T>, x_stride, weights.data(), static_cast<std::int64_t>(weights.size()),
                has_bias ? bias.data() : nullptr, dtype_of<T>, to, dtype_of<T>, stride, count, width});
    };
    multiply(0, rows, out.data(), out_stride);
    for (std::int64_t r = 0; r < rows; ++r) {
        std::int64_t column = 0;
        for (const Packed* part : parts) {
            for (std::int64_t n = 0; n < part->weights.outputs; ++n, ++column) {
                double sum = 0, size = 0, highest = 0;
                for (std::int64_t k = 0; k < width; ++k) {
                    const double a = to_float(x[r * x_stride + k]), w = part->values[static_cast<std::size_t>(n * width + k)];
                    sum += a * w;
                    size += std::abs(a);
                    highest = std::max(highest, std::abs(w));
                }
                if (has_bias) sum += to_float(bias[column]);
                // Float sums of at most 600 terms; minima and codes of a block cancel.
                check_close(format_name(part->weights.format), r * outputs + column, to_float(out[r * out_stride + column]), sum,
                            relative_of<T>(2), 4e-6 * size * highest + 1e-6);
            }
        }
        for (std::int64_t i = r * out_stride + outputs; i < std::min(out.size(), (r + 1) * out_stride); ++i) CHECK(to_float(out[i]) == 77);
        Buffer<T> alone(outputs);
        multiply(r, 1, alone.data(), outputs);
        check_same_bits("a row alone", alone.data(), out.data() + r * out_stride, outputs);
    }
}

void check_matrix(Random& random, const Packed& packed) {
    check_unpacked(packed);
    for (const std::int64_t rows : {1, 2, 3, 5, 9, 14}) {
        check_products<float>(random, {&packed}, rows, rows % 2 == 0);
        check_products<bf16>(random, {&packed}, rows, rows % 2 == 1);
    }
}

TEST(matmul_floats) {
    Random random(20);
    for (const Format format : {Format::f32, Format::bf16}) {
        for (const std::int64_t width : {1, 2, 3, 15, 17, 33, 64, 257, 300}) {
            for (const std::int64_t outputs : {1, 15, 17, 48}) {
                const bool turned = outputs == 17;
                check_matrix(random, width % 2 ? pack_float_rows<float>(random, format, outputs, width, turned)
                                               : pack_float_rows<bf16>(random, format, outputs, width, turned));
            }
        }
    }
}

struct Named {
    Format format;
    const char* name;
};
constexpr Named kBlockFormats[] = {{Format::q4_0, "Q4_0"}, {Format::q4_1, "Q4_1"}, {Format::q5_0, "Q5_0"}, {Format::q5_1, "Q5_1"},
                                   {Format::q8_0, "Q8_0"}, {Format::q4_k, "Q4_K"}, {Format::q5_k, "Q5_K"}, {Format::q6_k, "Q6_K"}};

TEST(matmul_blocks) {
    Random random(21);
    for (const Named& named : kBlockFormats) {
        for (const std::int64_t blocks : {1, 2, 5}) {
            const std::int64_t width = blocks * block_type(named.name).elements;
            if (width > 600) continue;
            for (const std::int64_t outputs : {1, 17, 48}) {
                check_matrix(random, pack_block_rows(random, named.format, named.name, outputs, width, outputs == 17));
            }
        }
    }
}

TEST(matmul_int8) {
    Random random(22);
    for (const std::int64_t width : {1, 31, 32, 33, 128, 160, 300, 416}) {
        for (const std::int64_t outputs : {1, 17, 48}) {
            const bool turned = outputs == 17;
            check_matrix(random, pack_i8_rows(random, outputs, width, turned));
            check_matrix(random, width % 2 ? pack_float_rows<float>(random, Format::q8_0, outputs, width, turned)
                                           : pack_float_rows<bf16>(random, Format::q8_0, outputs, width, turned));
        }
    }
}

TEST(matmul_w4) {
    Random random(23);
    for (const std::int64_t group : {32, 64, 128}) {
        for (const std::int64_t outputs : {1, 17, 48}) check_matrix(random, pack_w4_rows(random, outputs, 3 * group, group));
    }
}

// Several parts side by side, of different formats and ragged outputs, on one thread and on several.
TEST(matmul_of_parts) {
    Random random(24);
    const Packed a = pack_float_rows<float>(random, Format::f32, 19, 256, false);
    const Packed b = pack_float_rows<bf16>(random, Format::bf16, 33, 256, false);
    const Packed c = pack_block_rows(random, Format::q4_k, "Q4_K", 19, 256, false);
    const Packed d = pack_block_rows(random, Format::q6_k, "Q6_K", 5, 256, false);
    const Packed e = pack_block_rows(random, Format::q8_0, "Q8_0", 200, 256, false);
    for_threads([&] {
        for (const std::int64_t rows : {1, 7, 40}) {
            check_products<float>(random, {&a, &b, &a}, rows, true);
            check_products<bf16>(random, {&c, &d, &e}, rows, false);
        }
    });
}

// Rows in any number, so in tiles of any size and on any threads, have the bits that they have in twos or alone.
void check_shapes(Random& random, const Packed& packed) {
    const Weights& w = packed.weights;
    const std::int64_t rows = 1 + random.below(random.below(3) ? 40 : 260), stride = w.width + random.below(3);
    const Buffer<float> x = random_buffer<float>(random, (rows - 1) * stride + w.width);
    const auto multiply = [&](std::int64_t row, std::int64_t count) {
        Buffer<float> out(count * w.outputs);
        matmul({x.data() + row * stride, DType::float32, stride, &w, 1, nullptr, DType::float32, out.data(), DType::float32, w.outputs,
                count, w.width});
        return out;
    };
    use_threads(1 + static_cast<int>(random.below(3)));
    const Buffer<float> all = multiply(0, rows);
    for (int i = 0; i < 3; ++i) {
        const std::int64_t row = random.below(rows), count = std::min(1 + random.below(2) * random.below(50), rows - row);
        use_threads(1 + static_cast<int>(random.below(3)));
        const Buffer<float> some = multiply(row, count);
        check_same_bits(format_name(w.format), some.data(), all.data() + row * w.outputs, some.size());
    }
    use_threads(1);
}

TEST(matmul_of_any_shape) {
    Random random(27);
    for (int i = 0; i < 8; ++i) {
        const auto outputs = [&] { return 1 + random.below(random.below(4) ? 50 : 300); };
        const auto width = [&] { return 1 + random.below(random.below(4) ? 100 : 700); };
        for (const Format format : {Format::f32, Format::bf16, Format::q8_0}) {
            check_shapes(random, pack_float_rows<float>(random, format, outputs(), width(), false));
        }
        check_shapes(random, pack_i8_rows(random, outputs(), width(), false));
        const std::int64_t group = 32 << random.below(3);
        check_shapes(random, pack_w4_rows(random, outputs(), group * (1 + random.below(6)), group));
        const Named& named = kBlockFormats[i];
        const std::int64_t elements = block_type(named.name).elements;
        const std::int64_t blocks = elements < 256 ? 1 + random.below(24) : 1 + random.below(3);
        check_shapes(random, pack_block_rows(random, named.format, named.name, outputs(), blocks * elements, false));
    }
}

// Infinities and NaN in one row stay there.
TEST(matmul_of_extremes) {
    Random random(25);
    for (const Named& named : kBlockFormats) {
        const Packed w = pack_block_rows(random, named.format, named.name, 17, 256, false);
        for (const float bad : {INFINITY, -INFINITY, NAN, 3e38f, 1e-40f, 0.0f}) {
            Buffer<float> x = random_buffer<float>(random, 3 * 256);
            const Buffer<float> good = x;
            for (std::int64_t k = 0; k < 256; ++k) x[256 + k] = k % 5 ? bad : -bad;
            Buffer<float> out(3 * 17), expected(3 * 17);
            const auto multiply = [&](const Buffer<float>& from, Buffer<float>& to) {
                matmul({from.data(), DType::float32, 256, &w.weights, 1, nullptr, DType::float32, to.data(), DType::float32, 17, 3, 256});
            };
            multiply(x, out);
            multiply(good, expected);
            check_same_bits("the row above", out.data(), expected.data(), 17);
            check_same_bits("the row below", out.data() + 34, expected.data() + 34, 17);
            if (bad == 0) {
                for (std::int64_t n = 17; n < 34; ++n) CHECK(out[n] == 0);
            }
        }
    }
}

// Dots are exact integers and float operations stand in one order, so levels with fused multiply-adds agree in every bit.
TEST_ONCE(quantised_bits_of_all_levels) {
    Random random(26);
    std::vector<Packed> matrices;
    for (const Named& named : kBlockFormats) matrices.push_back(pack_block_rows(random, named.format, named.name, 35, 768, false));
    matrices.push_back(pack_i8_rows(random, 35, 416, false));
    matrices.push_back(pack_w4_rows(random, 35, 384, 128));
    std::vector<std::string> levels = supported_isas();
    levels.erase(levels.begin());  // scalar rounds products
    for (const Packed& matrix : matrices) {
        const Weights& w = matrix.weights;
        for (const std::int64_t rows : {1, 4, 19, 50}) {
            const Buffer<float> x = random_buffer<float>(random, rows * w.width);
            Buffer<float> first(rows * w.outputs), out(rows * w.outputs);
            for (const std::string& level : levels) {
                set_isa(level);
                Buffer<float>& to = level == levels[0] ? first : out;
                matmul({x.data(), DType::float32, w.width, &w, 1, nullptr, DType::float32, to.data(), DType::float32, w.outputs, rows,
                        w.width});
                check_same_bits(level.c_str(), to.data(), first.data(), to.size());
            }
        }
    }
}

// Rows of a packed table and of one in its file, in either type, times a scale; ids outside the table are refused.
TEST(embedding) {
    Random random(26);
    for_types([&](auto out_type, auto source_type) {
        using T = decltype(out_type);
        using S = decltype(source_type);
        const char* name = std::is_same_v<S, bf16> ? "BF16" : "F32";
        for (const std::int64_t width : kWidths) {
            constexpr std::int64_t vocab = 21;
            const Packed packed = pack_float_rows<S>(random, std::is_same_v<S, bf16> ? Format::bf16 : Format::f32, vocab, width, false);
            Buffer<S> rows(vocab * width);
            for (std::int64_t i = 0; i < rows.size(); ++i) {
                rows[i] = from_float<S>(static_cast<float>(packed.values[static_cast<std::size_t>(i)]));
            }
            const auto* bytes = reinterpret_cast<const std::uint8_t*>(rows.data());
            const BlockTable table = block_table(name, bytes, width * static_cast<std::int64_t>(sizeof(S)), vocab, width);
            const Matrix matrix({packed.weights});
            Buffer<std::int64_t> ids(5);
            for (std::int64_t i = 0; i < ids.size(); ++i) ids[i] = i == 0 ? vocab - 1 : random.below(vocab);
            for (const float scale : {1.0f, 8.0f, to_float(to_bf16(0.71f))}) {
                Buffer<T> expected(5 * width), from_matrix(5 * width), from_table(5 * width);
                for (std::int64_t i = 0; i < expected.size(); ++i) {
                    const float value = to_float(from_float<T>(to_float(rows[ids[i / width] * width + i % width])));
                    expected[i] = from_float<T>(value * scale);
                }
                embedding_packed(matrix, {ids.data(), from_matrix.data(), dtype_of<T>, 5, scale});
                embedding_blocks(table, {ids.data(), from_table.data(), dtype_of<T>, 5, scale});
                check_same_bits("embedding, packed", from_matrix.data(), expected.data(), expected.size());
                check_same_bits("embedding, from a file", from_table.data(), expected.data(), expected.size());
            }
            Buffer<T> out(width);
            for (const std::int64_t bad : {std::int64_t{-1}, vocab}) {
                ids[0] = bad;
                const EmbedCall call{ids.data(), out.data(), dtype_of<T>, 1, 1.0f};
                check_throws<std::out_of_range>("embedding", [&] { embedding_packed(matrix, call); });
                check_throws<std::out_of_range>("embedding", [&] { embedding_blocks(table, call); });
            }
        }
    });
}

}  // namespace
}  // namespace canter::test
