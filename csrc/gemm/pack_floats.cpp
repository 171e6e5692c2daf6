#include "gemm/pack_floats.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "gemm/matmul.h"
#include "gemm/quant/layout.h"
#include "gemm/quant/quant.h"
#include "parallel/rows.h"

namespace canter {
namespace {

struct half {
    std::uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

inline float to_float(half x) {
    const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    if (rest >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    // As if the exponents had one range: subnormal halves become normal floats in the multiplication, exactly.
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest << 13) * 0x1p112f));
}

inline bf16 to_bf16(bf16 x) { return x; }

template <class T>
inline bf16 to_bf16(T x) {
    const float value = to_float(x);
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if (value != value) return bf16{0x7fc0};
    return bf16{static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <class T>
const T* source_row(const PackFloatsCall& c, std::int64_t n) {
    return static_cast<const T*>(c.source) + (c.row_index ? c.row_index[n] : n) * c.row_stride;
}

// The width in slices: what a slice writes stays in the first cache while its sixteen rows pass.
constexpr std::int64_t kSlice = 128;

template <class T>
void pack_panel(const PackFloatsCall& c, std::int64_t panel, std::int64_t bytes) {
    const std::int64_t first = panel * kPanelOutputs, count = std::min(kPanelOutputs, c.outputs - first);
    std::uint8_t* dest = c.dest + panel * bytes;
    if (count < kPanelOutputs || c.width % 2 != 0) std::memset(dest, 0, static_cast<std::size_t>(bytes));
    for (std::int64_t begin = 0; begin < c.width; begin += kSlice) {
        const std::int64_t end = std::min(begin + kSlice, c.width);
        for (std::int64_t lane = 0; lane < count; ++lane) {
            const T* row = source_row<T>(c, first + lane);
            if (c.format == Format::f32) {
                auto* out = reinterpret_cast<float*>(dest) + lane;
                for (std::int64_t k = begin; k < end; ++k) out[k * kPanelOutputs] = to_float(row[k]);
            } else {
                auto* out = reinterpret_cast<bf16*>(dest) + lane * 2;
                for (std::int64_t k = begin; k < end; ++k) out[k / 2 * 2 * kPanelOutputs + k % 2] = to_bf16(row[k]);
            }
        }
    }
}

// A scale, which has no sign, to the nearest half, ties to even.
half to_half(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    if (bits > 0x7f800000u) return half{0x7e00};
    if (bits >= 0x477ff000u) return half{0x7c00};  // what rounds to 65536
    // The last place of 0.5 is the step of the halves below 2^-14.
    if (bits < 0x38800000u) return half{static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x + 0.5f) - 0x3f000000u)};
    return half{static_cast<std::uint16_t>(((bits + 0xfffu + (bits >> 13 & 1u)) >> 13) - (112u << 10))};
}

// 32 values as codes; gives what a code counts. Loops of fixed length, which become vectors on any machine.
float round_block(const float* values, std::int8_t* codes) {
    std::int32_t highest = 0;  // of the magnitudes' bits, which order as they do
    for (int i = 0; i < kRun; ++i) highest = std::max(highest, std::bit_cast<std::int32_t>(values[i]) & 0x7fffffff);
    const float d = std::bit_cast<float>(highest) / 127.0f, inverse = d == 0.0f ? 0.0f : 1.0f / d;
    if (highest >= 0x7f800000 || inverse == HUGE_VALF) {
        std::memset(codes, 0, kRun);  // nothing to round; or so small that d is zero in float16
        return d;
    }
    std::int32_t rounded[kRun];
    for (int i = 0; i < kRun; ++i) {
        const float value = values[i] * inverse, size = std::fabs(value);
        const auto below = static_cast<std::int32_t>(size);
        const std::int32_t nearest = below + (size - static_cast<float>(below) >= 0.5f);
        rounded[i] = value < 0.0f ? -nearest : nearest;
    }
    for (int i = 0; i < kRun; ++i) codes[i] = static_cast<std::int8_t>(rounded[i]);
    return d;
}

// In slices too; a row's last block is filled up with zeros.
template <class T>
void round_panel(const PackFloatsCall& c, std::int64_t panel, std::int64_t bytes) {
    const std::int64_t first = panel * kPanelOutputs, count = std::min(kPanelOutputs, c.outputs - first), blocks = row_runs(c.width);
    std::uint8_t* dest = c.dest + panel * bytes;
    if (count < kPanelOutputs) std::memset(dest, 0, static_cast<std::size_t>(bytes));
    for (std::int64_t begin = 0; begin < blocks; begin += kSlice / kRun) {
        const std::int64_t end = std::min(begin + kSlice / kRun, blocks);
        for (std::int64_t lane = 0; lane < count; ++lane) {
            const T* row = source_row<T>(c, first + lane);
            for (std::int64_t b = begin; b < end; ++b) {
                float values[kRun] = {};
                std::int8_t codes[kRun];
                if (const std::int64_t left = c.width - b * kRun; left >= kRun) {
                    for (int i = 0; i < kRun; ++i) values[i] = to_float(row[b * kRun + i]);
                } else {
                    for (int i = 0; i < left; ++i) values[i] = to_float(row[b * kRun + i]);
                }
                const float d = round_block(values, codes);
                put_q8_0(dest, b, static_cast<int>(lane), codes, to_half(d).bits);
            }
        }
    }
}

template <class T>
void pack_from(const PackFloatsCall& c) {
    const std::int64_t bytes = panel_bytes(c.format, c.width, 0);
    const auto pack = c.format == Format::q8_0 ? round_panel<T> : pack_panel<T>;
    for_rows(num_panels(c.outputs), c.width * kPanelOutputs, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t p = begin; p < end; ++p) pack(c, p, bytes);
    });
}

}  // namespace

void pack_floats(const PackFloatsCall& call) {
    if (call.format != Format::f32 && call.format != Format::bf16 && call.format != Format::q8_0) {
        throw std::invalid_argument(std::string("pack_floats: expected f32, bf16 or q8_0, got ") + format_name(call.format) + ".");
    }
    switch (call.source_type) {
        case SourceType::f32: return pack_from<float>(call);
        case SourceType::bf16: return pack_from<bf16>(call);
        case SourceType::f16: return pack_from<half>(call);
    }
    throw std::invalid_argument("pack_floats: unknown source type.");
}

void unpack_rows(const Matrix& matrix, std::int64_t begin, std::int64_t end, float* out) {
    std::int64_t first = 0;
    for (const Weights& w : matrix.parts) {
        const std::int64_t from = std::max(begin - first, std::int64_t{0}), to = std::min(end - first, w.outputs);
        if (from < to) {
            float* place = out + (first + from - begin) * w.width;
            if (w.format != Format::f32 && w.format != Format::bf16) {
                unpack_quant_rows(w, from, to, place, w.width);
            } else {
                const std::int64_t bytes = panel_bytes(w.format, w.width, 0);
                for (std::int64_t n = from; n < to; ++n, place += w.width) {
                    const std::uint8_t* panel = w.data + n / kPanelOutputs * bytes;
                    const std::int64_t lane = n % kPanelOutputs;
                    if (w.format == Format::f32) {
                        const auto* values = reinterpret_cast<const float*>(panel) + lane;
                        for (std::int64_t k = 0; k < w.width; ++k) place[k] = values[k * kPanelOutputs];
                    } else {
                        const auto* values = reinterpret_cast<const bf16*>(panel) + lane * 2;
                        for (std::int64_t k = 0; k < w.width; ++k) place[k] = to_float(values[k / 2 * 2 * kPanelOutputs + k % 2]);
                    }
                }
            }
        }
        first += w.outputs;
    }
}

}  // namespace canter
