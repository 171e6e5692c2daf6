// GGUF blocks to floats.

#include "blocks.h"
#include "isa/isa.h"
#include "quant/dequantize.h"

namespace canter::test {
namespace {

template <class T>
Buffer<T> decode(const QuantLayout& layout, const Buffer<std::uint8_t>& data, std::int64_t blocks) {
    Buffer<T> out(blocks * layout.elements);
    dequantize({data.data(), out.data(), dtype_of<T>, &layout, blocks});
    return out;
}

// Codes are what the format says: float32 arithmetic leaves a rounding or two.
TEST(dequantize) {
    Random random(7);
    for (const BlockType& type : block_types()) {
        for (const QuantLayout& layout : kQuantLayouts) {
            if (std::string(layout.name) != type.name) continue;
            CHECK(layout.elements == type.elements && layout.bytes == type.bytes);
            const std::int64_t blocks = type.elements == 1 ? 601 : 9;
            const Buffer<std::uint8_t> data = random_blocks(random, type, blocks);
            const Buffer<float> floats = decode<float>(layout, data, blocks);
            std::vector<double> expected(static_cast<std::size_t>(type.elements));
            for (std::int64_t i = 0; i < floats.size(); ++i) {
                if (i % type.elements == 0) type.decode(data.data() + i / type.elements * type.bytes, expected.data());
                const double value = expected[static_cast<std::size_t>(i % type.elements)];
                check_close(type.name, i, floats[i], value, 1e-6, 2e-5);  // minima cancel values of up to 2 * 63 * 31
            }
        }
    }
}

// Every format with any bytes at all, infinities and NaN as scales too: exact sizes, and bfloat16 is the rounded float.
TEST(dequantize_any_bytes) {
    Random random(8);
    for (const QuantLayout& layout : kQuantLayouts) {
        for (const std::int64_t blocks : {1, 2, 5, 257}) {
            Buffer<std::uint8_t> data(blocks * layout.bytes);
            for (std::int64_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::uint8_t>(random.bits());
            const Buffer<float> floats = decode<float>(layout, data, blocks);
            const Buffer<bf16> halves = decode<bf16>(layout, data, blocks);
            for (std::int64_t i = 0; i < floats.size(); ++i) {
                if (std::isnan(floats[i])) CHECK(std::isnan(to_float(halves[i])));
                else CHECK(halves[i].bits == to_bf16(floats[i]).bits);
            }
        }
    }
}

TEST(dequantize_on_threads) {
    Random random(9);
    const QuantLayout& layout = kQuantLayouts[3];
    const Buffer<std::uint8_t> data = random_blocks(random, block_type(layout.name), 10001);
    const Buffer<float> expected = decode<float>(layout, data, 10001);
    for_threads([&] { check_same_bits("dequantize", decode<float>(layout, data, 10001).data(), expected.data(), expected.size()); });
}

}  // namespace
}  // namespace canter::test
