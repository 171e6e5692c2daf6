// Block decoders. Products and sums are separate operations (the build forbids contraction), as the format's reference
// has them: a fused multiply-add would round differently. Included once per instruction set.

namespace canter::CANTER_ISA {

inline std::uint16_t read16(const std::uint8_t* p) { return static_cast<std::uint16_t>(p[0] | p[1] << 8); }
inline std::uint32_t read32(const std::uint8_t* p) { return read16(p) | static_cast<std::uint32_t>(read16(p + 2)) << 16; }

inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

// IEEE binary16 to float32, exact: subnormals, infinities and NaN payloads included.
inline float half(const std::uint8_t* p) {
    const std::uint32_t h = read16(p), sign = (h & 0x8000u) << 16, magnitude = (h & 0x7fffu) << 13;
    if (magnitude >= 0x0f800000u) return float_of(sign | (magnitude + 0x70000000u));  // exponent 31 becomes 255
    // A scale by 2^112 turns the exponent's bias of 15 into 127 and makes subnormals normal.
    const float value = float_of(magnitude) * float_of(0x77800000u);
    return float_of(sign | __builtin_bit_cast(std::uint32_t, value));
}

inline void decode_f32(const std::uint8_t* b, float* y) { *y = float_of(read32(b)); }
inline void decode_f16(const std::uint8_t* b, float* y) { *y = half(b); }
inline void decode_bf16(const std::uint8_t* b, float* y) { *y = float_of(static_cast<std::uint32_t>(read16(b)) << 16); }

inline void decode_q4_0(const std::uint8_t* b, float* y) {
    const float d = half(b);
    for (int i = 0; i < 16; ++i) {
        y[i] = d * static_cast<float>((b[2 + i] & 15) - 8);
        y[i + 16] = d * static_cast<float>((b[2 + i] >> 4) - 8);
    }
}

inline void decode_q4_1(const std::uint8_t* b, float* y) {
    const float d = half(b), m = half(b + 2);
    for (int i = 0; i < 16; ++i) {
        y[i] = d * static_cast<float>(b[4 + i] & 15) + m;
        y[i + 16] = d * static_cast<float>(b[4 + i] >> 4) + m;
    }
}

// The five-bit numbers of Q5_0 and Q5_1: four low bits from `low`, the fifth from bit i of `high`.
inline int five_low(const std::uint8_t* low, std::uint32_t high, int i) { return (low[i] & 15) | static_cast<int>(high >> i & 1) << 4; }
inline int five_high(const std::uint8_t* low, std::uint32_t high, int i) {
    return low[i] >> 4 | static_cast<int>(high >> (i + 16) & 1) << 4;
}

inline void decode_q5_0(const std::uint8_t* b, float* y) {
    const float d = half(b);
    const std::uint32_t high = read32(b + 2);
    for (int i = 0; i < 16; ++i) {
        y[i] = d * static_cast<float>(five_low(b + 6, high, i) - 16);
        y[i + 16] = d * static_cast<float>(five_high(b + 6, high, i) - 16);
    }
}

inline void decode_q5_1(const std::uint8_t* b, float* y) {
    const float d = half(b), m = half(b + 2);
    const std::uint32_t high = read32(b + 4);
    for (int i = 0; i < 16; ++i) {
        y[i] = d * static_cast<float>(five_low(b + 8, high, i)) + m;
        y[i + 16] = d * static_cast<float>(five_high(b + 8, high, i)) + m;
    }
}

inline void decode_q8_0(const std::uint8_t* b, float* y) {
    const float d = half(b);
    for (int i = 0; i < 32; ++i) y[i] = d * static_cast<float>(static_cast<std::int8_t>(b[2 + i]));
}

inline void decode_q2_k(const std::uint8_t* b, float* y) {
    const std::uint8_t *scales = b, *q = b + 16;
    const float d = half(b + 80), dmin = half(b + 82);
    for (int run = 0; run < 16; ++run) {  // 16 elements share a scale; 128 elements share 32 bytes
        const float scale = d * static_cast<float>(scales[run] & 15), minimum = dmin * static_cast<float>(scales[run] >> 4);
        const std::uint8_t* bytes = q + run / 8 * 32 + run % 2 * 16;
        const int shift = run % 8 / 2 * 2;
        for (int i = 0; i < 16; ++i) y[run * 16 + i] = scale * static_cast<float>(bytes[i] >> shift & 3) - minimum;
    }
}

inline void decode_q3_k(const std::uint8_t* b, float* y) {
    const std::uint8_t *mask = b, *q = b + 32, *packed = b + 96;
    const float d = half(b + 108);
    for (int run = 0; run < 16; ++run) {
        const int low = packed[run % 8] >> (run / 8 * 4) & 15, high = packed[8 + run % 4] >> (run / 4 * 2) & 3;
        const float scale = d * static_cast<float>((low | high << 4) - 32);
        const std::uint8_t* bytes = q + run / 8 * 32 + run % 2 * 16;
        const std::uint8_t* bits = mask + run % 2 * 16;
        const int shift = run % 8 / 2 * 2, bit = run / 2;
        for (int i = 0; i < 16; ++i) {
            const int value = (bytes[i] >> shift & 3) - ((bits[i] >> bit & 1) ? 0 : 4);
            y[run * 16 + i] = scale * static_cast<float>(value);
        }
    }
}

// Six-bit scale and minimum of sub-block s, out of the twelve bytes of Q4_K and Q5_K.
inline void scale_and_minimum(const std::uint8_t* p, int s, int& scale, int& minimum) {
    if (s < 4) {
        scale = p[s] & 63;
        minimum = p[s + 4] & 63;
    } else {
        scale = (p[s + 4] & 15) | p[s - 4] >> 6 << 4;
        minimum = p[s + 4] >> 4 | p[s] >> 6 << 4;
    }
}

inline void decode_q4_k(const std::uint8_t* b, float* y) {
    const float d = half(b), dmin = half(b + 2);
    for (int s = 0; s < 8; ++s) {
        int sc, m;
        scale_and_minimum(b + 4, s, sc, m);
        const float scale = d * static_cast<float>(sc), minimum = dmin * static_cast<float>(m);
        const std::uint8_t* bytes = b + 16 + s / 2 * 32;
        const int shift = s % 2 * 4;
        for (int i = 0; i < 32; ++i) y[s * 32 + i] = scale * static_cast<float>(bytes[i] >> shift & 15) - minimum;
    }
}

inline void decode_q5_k(const std::uint8_t* b, float* y) {
    const float d = half(b), dmin = half(b + 2);
    for (int s = 0; s < 8; ++s) {
        int sc, m;
        scale_and_minimum(b + 4, s, sc, m);
        const float scale = d * static_cast<float>(sc), minimum = dmin * static_cast<float>(m);
        const std::uint8_t *high = b + 16, *bytes = b + 48 + s / 2 * 32;
        const int shift = s % 2 * 4;
        for (int i = 0; i < 32; ++i) {
            const int value = (bytes[i] >> shift & 15) | (high[i] >> s & 1) << 4;
            y[s * 32 + i] = scale * static_cast<float>(value) - minimum;
        }
    }
}

inline void decode_q6_k(const std::uint8_t* b, float* y) {
    const std::uint8_t *low = b, *high = b + 128, *scales = b + 192;
    const float d = half(b + 208);
    for (int run = 0; run < 16; ++run) {
        const float scale = d * static_cast<float>(static_cast<std::int8_t>(scales[run]));
        const int group = run % 8 / 2, at = run % 2 * 16;  // 128 elements: four groups of 32 share 64 low and 32 high bytes
        const std::uint8_t *l = low + run / 8 * 64 + group % 2 * 32 + at, *h = high + run / 8 * 32 + at;
        const int low_shift = group / 2 * 4, high_shift = group * 2;
        for (int i = 0; i < 16; ++i) {
            const int value = ((l[i] >> low_shift & 15) | (h[i] >> high_shift & 3) << 4) - 32;
            y[run * 16 + i] = scale * static_cast<float>(value);
        }
    }
}

// Sixteen bytes of indices into the levels of IQ4: low nibbles first, then high ones.
inline void decode_levels(const std::uint8_t* bytes, float scale, float* y) {
    constexpr float levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    for (int i = 0; i < 16; ++i) {
        y[i] = scale * levels[bytes[i] & 15];
        y[i + 16] = scale * levels[bytes[i] >> 4];
    }
}

inline void decode_iq4_nl(const std::uint8_t* b, float* y) { decode_levels(b + 2, half(b), y); }

inline void decode_iq4_xs(const std::uint8_t* b, float* y) {
    const float d = half(b);
    const int high = read16(b + 2);
    for (int run = 0; run < 8; ++run) {
        const int scale = (b[4 + run / 2] >> (run % 2 * 4) & 15) | (high >> (2 * run) & 3) << 4;
        decode_levels(b + 8 + run * 16, d * static_cast<float>(scale - 32), y + run * 32);
    }
}

template <auto Decode>
inline void decode_blocks(const DequantizeArgs& a, std::int64_t begin, std::int64_t end) {
    const std::int64_t elements = a.layout->elements, bytes = a.layout->bytes;
    const std::uint8_t* block = a.data + begin * bytes;
    if (a.out_type == DType::float32) {
        float* out = static_cast<float*>(a.out) + begin * elements;
        for (std::int64_t i = begin; i < end; ++i, block += bytes, out += elements) Decode(block, out);
        return;
    }
    // A batch of blocks in float32 first, so that types of one element a block also fill vectors.
    alignas(64) float wide[256];
    const std::int64_t batch = 256 / elements;
    for (std::int64_t i = begin; i < end; i += batch) {
        const std::int64_t count = i + batch < end ? batch : end - i;
        for (std::int64_t j = 0; j < count; ++j, block += bytes) Decode(block, wide + j * elements);
        copy_converted(wide, static_cast<bf16*>(a.out) + i * elements, count * elements);
    }
}

inline void dequantize(const DequantizeArgs& a, std::int64_t begin, std::int64_t end) {
    switch (a.layout->type) {
        case QuantType::F32: return decode_blocks<decode_f32>(a, begin, end);
        case QuantType::F16: return decode_blocks<decode_f16>(a, begin, end);
        case QuantType::BF16: return decode_blocks<decode_bf16>(a, begin, end);
        case QuantType::Q4_0: return decode_blocks<decode_q4_0>(a, begin, end);
        case QuantType::Q4_1: return decode_blocks<decode_q4_1>(a, begin, end);
        case QuantType::Q5_0: return decode_blocks<decode_q5_0>(a, begin, end);
        case QuantType::Q5_1: return decode_blocks<decode_q5_1>(a, begin, end);
        case QuantType::Q8_0: return decode_blocks<decode_q8_0>(a, begin, end);
        case QuantType::Q2_K: return decode_blocks<decode_q2_k>(a, begin, end);
        case QuantType::Q3_K: return decode_blocks<decode_q3_k>(a, begin, end);
        case QuantType::Q4_K: return decode_blocks<decode_q4_k>(a, begin, end);
        case QuantType::Q5_K: return decode_blocks<decode_q5_k>(a, begin, end);
        case QuantType::Q6_K: return decode_blocks<decode_q6_k>(a, begin, end);
        case QuantType::IQ4_NL: return decode_blocks<decode_iq4_nl>(a, begin, end);
        case QuantType::IQ4_XS: return decode_blocks<decode_iq4_xs>(a, begin, end);
    }
}

}  // namespace canter::CANTER_ISA
