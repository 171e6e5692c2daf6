#include "gemm/pack_floats.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "gemm/matmul.h"
#include "gemm/quant/quant.h"
#include "parallel/rows.h"
#include "parallel/thread_pool.h"

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

// Rows are rounded a slab at a time: rows of codes as they are packed.
template <class T>
void pack_int8(const PackFloatsCall& c, std::int64_t bytes) {
    constexpr std::int64_t slab = 64 * kPanelOutputs;
    const std::int64_t most = std::min(slab, c.outputs);
    const auto codes = std::make_unique<std::int8_t[]>(static_cast<std::size_t>(most * c.width));
    const auto scales = std::make_unique<float[]>(static_cast<std::size_t>(most));
    for (std::int64_t begin = 0; begin < c.outputs; begin += slab) {
        const std::int64_t count = std::min(slab, c.outputs - begin);
        for_rows(count, c.width, [&](std::int64_t row_begin, std::int64_t row_end) {
            for (std::int64_t r = row_begin; r < row_end; ++r) {
                const T* row = source_row<T>(c, begin + r);
                float highest = 0.0f;
                bool finite = true;
                for (std::int64_t k = 0; k < c.width; ++k) {
                    const float magnitude = std::fabs(to_float(row[k]));
                    highest = std::max(highest, magnitude);
                    finite = finite && magnitude < HUGE_VALF;
                }
                // Where 127 / highest would overflow, weights are as good as zero.
                const bool usable = finite && highest > 1e-35f;
                const float inverse = usable ? 127.0f / highest : 0.0f;
                scales[static_cast<std::size_t>(r)] = usable ? highest / 127.0f : finite ? 0.0f : NAN;
                std::int8_t* out = codes.get() + r * c.width;
                for (std::int64_t k = 0; k < c.width; ++k) out[k] = finite ? static_cast<std::int8_t>(std::nearbyintf(to_float(row[k]) * inverse)) : 0;
            }
        });
        pack_i8(codes.get(), scales.get(), nullptr, count, c.width, c.dest + begin / kPanelOutputs * bytes);
    }
}

template <class T>
void pack_from(const PackFloatsCall& c) {
    const std::int64_t bytes = panel_bytes(c.format, c.width, 0);
    if (c.format == Format::i8) return pack_int8<T>(c, bytes);
    for_rows(num_panels(c.outputs), c.width * kPanelOutputs, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t p = begin; p < end; ++p) pack_panel<T>(c, p, bytes);
    });
}

}  // namespace

void pack_floats(const PackFloatsCall& call) {
    if (call.format != Format::f32 && call.format != Format::bf16 && call.format != Format::i8) {
        throw std::invalid_argument(std::string("pack_floats: expected f32, bf16 or i8, got ") + format_name(call.format) + ".");
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
