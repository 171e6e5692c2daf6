#include "blocks.h"

namespace canter::test {
namespace {

using Bytes = const std::uint8_t*;

void f16(Bytes b, double* y) { *y = half_value(b); }

void q4_0(Bytes b, double* y) {
    for (int i = 0; i < 32; ++i) y[i] = half_value(b) * ((i < 16 ? b[2 + i] & 15 : b[2 + i - 16] >> 4) - 8);
}

void q4_1(Bytes b, double* y) {
    for (int i = 0; i < 32; ++i) y[i] = half_value(b) * (i < 16 ? b[4 + i] & 15 : b[4 + i - 16] >> 4) + half_value(b + 2);
}

int five_bits(Bytes high, Bytes low, int i) { return (i < 16 ? low[i] & 15 : low[i - 16] >> 4) + (high[i / 8] >> i % 8 & 1) * 16; }

void q5_0(Bytes b, double* y) {
    for (int i = 0; i < 32; ++i) y[i] = half_value(b) * (five_bits(b + 2, b + 6, i) - 16);
}

void q5_1(Bytes b, double* y) {
    for (int i = 0; i < 32; ++i) y[i] = half_value(b) * five_bits(b + 4, b + 8, i) + half_value(b + 2);
}

void q8_0(Bytes b, double* y) {
    for (int i = 0; i < 32; ++i) y[i] = half_value(b) * static_cast<std::int8_t>(b[2 + i]);
}

int k_scale(Bytes s, int i) { return i < 4 ? s[i] & 63 : (s[i + 4] & 15) + s[i - 4] / 64 * 16; }
int k_minimum(Bytes s, int i) { return i < 4 ? s[i + 4] & 63 : s[i + 4] / 16 + s[i] / 64 * 16; }

void q4_k(Bytes b, double* y) {
    for (int i = 0; i < 256; ++i) {
        const int code = b[16 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
        y[i] = half_value(b) * k_scale(b + 4, i / 32) * code - half_value(b + 2) * k_minimum(b + 4, i / 32);
    }
}

void q5_k(Bytes b, double* y) {
    for (int i = 0; i < 256; ++i) {
        const int code = (b[48 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15) + (b[16 + i % 32] >> i / 32 & 1) * 16;
        y[i] = half_value(b) * k_scale(b + 4, i / 32) * code - half_value(b + 2) * k_minimum(b + 4, i / 32);
    }
}

void q6_k(Bytes b, double* y) {
    for (int i = 0; i < 256; ++i) {
        const int part = i / 128, group = i % 128 / 32, l = i % 32;
        const int low = b[part * 64 + group % 2 * 32 + l] >> group / 2 * 4 & 15, high = b[128 + part * 32 + l] >> group * 2 & 3;
        y[i] = half_value(b + 208) * static_cast<std::int8_t>(b[192 + i / 16]) * (low + 16 * high - 32);
    }
}

}  // namespace

const std::vector<BlockType>& block_types() {
    static const std::vector<BlockType> types = {
        {"F16", 1, 2, {0}, &f16},          {"Q4_0", 32, 18, {0}, &q4_0},      {"Q4_1", 32, 20, {0, 2}, &q4_1},
        {"Q5_0", 32, 22, {0}, &q5_0},      {"Q5_1", 32, 24, {0, 2}, &q5_1},   {"Q8_0", 32, 34, {0}, &q8_0},
        {"Q4_K", 256, 144, {0, 2}, &q4_k}, {"Q5_K", 256, 176, {0, 2}, &q5_k}, {"Q6_K", 256, 210, {208}, &q6_k},
    };
    return types;
}

const BlockType& block_type(const std::string& name) {
    for (const BlockType& type : block_types()) {
        if (name == type.name) return type;
    }
    fail("no block type ", name);
}

double half_value(const std::uint8_t* p) {
    const int bits = p[0] | p[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
        : exponent                     ? std::ldexp(1024 + fraction, exponent - 25)
                                       : std::ldexp(fraction, -24);
    return bits & 0x8000 ? -size : size;
}

Buffer<std::uint8_t> random_blocks(Random& random, const BlockType& type, std::int64_t count) {
    Buffer<std::uint8_t> out(count * type.bytes);
    for (std::int64_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::uint8_t>(random.bits());
    for (std::int64_t i = 0; i < count; ++i) {
        for (const std::int64_t at : type.halves) {  // exponents 8 to 15: from 2^-7 on, below 2
            std::uint8_t& high = out[i * type.bytes + at + 1];
            high = static_cast<std::uint8_t>((high & 0x83) | (8 + random.below(8)) << 2);
        }
    }
    return out;
}

}  // namespace canter::test
