// Between codes with scales and panels. They are moved, never rounded.

#include <algorithm>
#include <cstring>

#include "gemm/quant/layout.h"
#include "gemm/quant/quant.h"
#include "parallel/thread_pool.h"

namespace canter {
namespace {

constexpr int kGroups = 8;    // of four elements, in a run
constexpr int kBlock = 256;   // elements, the largest block

std::uint32_t word_at(const void* p) {
    std::uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

void put_word(void* p, std::uint32_t word) { std::memcpy(p, &word, sizeof word); }

// One output's codes of a run (32 bytes) into the run's bytes in a panel.
void put_codes(int bits, const std::uint8_t* codes, int lane, std::uint8_t* run) {
    std::uint32_t word[kGroups];
    std::memcpy(word, codes, sizeof word);
    std::uint8_t* at = run + 4 * lane;
    if (bits == 8) {
        for (int g = 0; g < kGroups; ++g) put_word(at + 64 * g, word[g]);
        return;
    }
    for (int q = 0; q < kGroups / 2; ++q) put_word(at + 64 * q, (word[2 * q] & 0x0f0f0f0fu) | (word[2 * q + 1] & 0x0f0f0f0fu) << 4);
    if (bits == 5) {
        std::uint32_t high = 0;
        for (int g = 0; g < kGroups; ++g) high |= (word[g] >> 4 & 0x01010101u) << g;
        put_word(at + 256, high);
    }
    if (bits == 6) {
        for (int plane = 0; plane < 2; ++plane) {
            std::uint32_t high = 0;
            for (int j = 0; j < 4; ++j) high |= (word[4 * plane + j] >> 4 & 0x03030303u) << (2 * j);
            put_word(at + 256 + 64 * plane, high);
        }
    }
}

// The other way round.
void take_codes(int bits, const std::uint8_t* run, int lane, std::uint8_t* codes) {
    std::uint32_t word[kGroups];
    const std::uint8_t* at = run + 4 * lane;
    if (bits == 8) {
        for (int g = 0; g < kGroups; ++g) word[g] = word_at(at + 64 * g);
    } else {
        for (int q = 0; q < kGroups / 2; ++q) {
            const std::uint32_t both = word_at(at + 64 * q);
            word[2 * q] = both & 0x0f0f0f0fu;
            word[2 * q + 1] = both >> 4 & 0x0f0f0f0fu;
        }
        if (bits == 5) {
            for (int g = 0; g < kGroups; ++g) word[g] |= (word_at(at + 256) >> g & 0x01010101u) << 4;
        }
        if (bits == 6) {
            for (int g = 0; g < kGroups; ++g) word[g] |= (word_at(at + 256 + g / 4 * 64) >> (2 * (g % 4)) & 0x03030303u) << 4;
        }
    }
    std::memcpy(codes, word, sizeof word);
}

// A GGUF block taken apart.
struct Block {
    std::uint8_t codes[kBlock];
    std::uint8_t d[2], m[2];  // f16
    std::uint8_t scales[16], minima[8];
};

void low_and_high(const std::uint8_t* bytes, int count, std::uint8_t* codes) {
    for (int i = 0; i < count; ++i) {
        codes[i] = bytes[i] & 15;
        codes[count + i] = bytes[i] >> 4;
    }
}

void fifth_bits(const std::uint8_t* bits, std::uint8_t* codes) {
    const std::uint32_t high = word_at(bits);
    for (int i = 0; i < 32; ++i) codes[i] |= static_cast<std::uint8_t>((high >> i & 1) << 4);
}

void take_apart(Format format, const std::uint8_t* b, Block& out) {
    std::memcpy(out.d, b, 2);
    std::memcpy(out.m, b + 2, 2);
    switch (format) {
        case Format::q4_0: return low_and_high(b + 2, 16, out.codes);
        case Format::q4_1: return low_and_high(b + 4, 16, out.codes);
        case Format::q5_0: low_and_high(b + 6, 16, out.codes); return fifth_bits(b + 2, out.codes);
        case Format::q5_1: low_and_high(b + 8, 16, out.codes); return fifth_bits(b + 4, out.codes);
        case Format::q8_0: std::memcpy(out.codes, b + 2, 32); return;
        case Format::q4_k:
        case Format::q5_k: {
            const std::uint8_t* p = b + 4;
            for (int s = 0; s < 4; ++s) {
                out.scales[s] = p[s] & 63;
                out.minima[s] = p[s + 4] & 63;
                out.scales[s + 4] = static_cast<std::uint8_t>((p[s + 8] & 15) | p[s] >> 6 << 4);
                out.minima[s + 4] = static_cast<std::uint8_t>(p[s + 8] >> 4 | p[s + 4] >> 6 << 4);
            }
            const std::uint8_t* low = b + (format == Format::q4_k ? 16 : 48);
            for (int i = 0; i < 4; ++i) low_and_high(low + 32 * i, 32, out.codes + 64 * i);
            if (format == Format::q5_k) {
                for (int s = 0; s < 8; ++s) {
                    for (int i = 0; i < 32; ++i) out.codes[32 * s + i] |= static_cast<std::uint8_t>((b[16 + i] >> s & 1) << 4);
                }
            }
            return;
        }
        case Format::q6_k: {
            std::memcpy(out.d, b + 208, 2);
            std::memcpy(out.scales, b + 192, 16);
            for (int half = 0; half < 2; ++half) {
                const std::uint8_t *low = b + 64 * half, *high = b + 128 + 32 * half;
                std::uint8_t* codes = out.codes + 128 * half;
                low_and_high(low, 64, codes);
                for (int s = 0; s < 4; ++s) {
                    for (int i = 0; i < 32; ++i) codes[32 * s + i] |= static_cast<std::uint8_t>((high[i] >> (2 * s) & 3) << 4);
                }
            }
            return;
        }
        default: return;
    }
}

std::int64_t gguf_block_bytes(Format format) {
    switch (format) {
        case Format::q4_0: return 18;
        case Format::q4_1: return 20;
        case Format::q5_0: return 22;
        case Format::q5_1: return 24;
        case Format::q8_0: return 34;
        case Format::q4_k: return 144;
        case Format::q5_k: return 176;
        case Format::q6_k: return 210;
        default: return 0;
    }
}

std::int64_t source_row(const std::int64_t* row_index, std::int64_t n) { return row_index ? row_index[n] : n; }

// body(panel's first output, number of its outputs, its bytes) for every panel, on all threads.
template <class F>
void each_panel(std::int64_t outputs, std::int64_t panel_bytes, std::uint8_t* dest, const F& body) {
    parallel_for(num_panels(outputs), [&](std::int64_t i) {
        const std::int64_t first = i * kPanelOutputs;
        std::uint8_t* panel = dest + i * panel_bytes;
        const int lanes = static_cast<int>(std::min(kPanelOutputs, outputs - first));
        if (lanes < kPanelOutputs) std::memset(panel, 0, static_cast<std::size_t>(panel_bytes));
        body(first, lanes, panel);
    });
}

float half_at(const std::uint8_t* p) {
    std::uint16_t h;
    std::memcpy(&h, p, sizeof h);
    const std::uint32_t sign = (h & 0x8000u) << 16, magnitude = (h & 0x7fffu) << 13;
    if (magnitude >= 0x0f800000u) return __builtin_bit_cast(float, sign | (magnitude + 0x70000000u));
    const float value = __builtin_bit_cast(float, magnitude) * 0x1p112f;
    return __builtin_bit_cast(float, sign | __builtin_bit_cast(std::uint32_t, value));
}

float float_at(const std::uint8_t* p) { return __builtin_bit_cast(float, word_at(p)); }

// What an output's code of one element stands for: scale * (code - offset), and then plus or minus a minimum.
struct Scaling {
    float scale, minimum;
    int offset;
};

Scaling scaling_of(Format format, const std::uint8_t* block, int run, int half, int lane) {
    const int offset = quant_layout(format).offset;
    switch (format) {
        case Format::w4: return {float_at(block + 4 * lane), 0.0f, block[64 + lane]};
        case Format::q4_1:
        case Format::q5_1: return {half_at(block + 2 * lane), half_at(block + 32 + 2 * lane), 0};
        case Format::q4_k:
        case Format::q5_k: {
            const float scale = half_at(block + 2 * lane) * static_cast<float>(block[64 + 16 * run + lane]);
            return {scale, -(half_at(block + 32 + 2 * lane) * static_cast<float>(block[192 + 16 * run + lane])), 0};
        }
        case Format::q6_k: {
            const auto scale = static_cast<std::int8_t>(block[32 + 16 * (2 * run + half) + lane]);
            return {half_at(block + 2 * lane) * static_cast<float>(scale), 0.0f, offset};
        }
        default: return {half_at(block + 2 * lane), 0.0f, offset};
    }
}

void unpack_row(const Weights& w, std::int64_t block_bytes, const std::uint8_t* panel, int lane, float* out) {
    const QuantLayoutInfo layout = quant_layout(w.format);
    const int block_runs = layout.block_runs ? layout.block_runs : static_cast<int>(w.group / kRun);
    const std::uint8_t* blocks = panel + quant_lead(w.format);
    for (std::int64_t i = 0; i < row_runs(w.width); ++i) {
        const std::uint8_t* block = blocks + i / block_runs * block_bytes;
        const int run = static_cast<int>(i % block_runs);
        std::uint8_t codes[kRun];
        take_codes(layout.bits, block + layout.header + run * layout.run_bytes(), lane, codes);
        const int count = static_cast<int>(std::min(kRun, w.width - i * kRun));
        float* place = out + i * kRun;
        if (layout.bits == 8) {
            const float scale = w.format == Format::i8 ? float_at(panel + 4 * lane) : half_at(block + 2 * lane);
            for (int k = 0; k < count; ++k) place[k] = scale * static_cast<float>(static_cast<std::int8_t>(codes[k]));
            continue;
        }
        for (int half = 0; half < 2; ++half) {
            const Scaling s = scaling_of(w.format, block, run, half, lane);
            for (int k = 16 * half; k < 16 * half + 16; ++k) {
                const float value = s.scale * static_cast<float>(codes[k] - s.offset);
                place[k] = layout.minima ? value + s.minimum : value;
            }
        }
    }
}

}  // namespace

void pack_blocks(Format format, const void* source, std::int64_t src_row_bytes, const std::int64_t* row_index, std::int64_t outputs,
                 std::int64_t width, std::uint8_t* dest) {
    const QuantLayoutInfo layout = quant_layout(format);
    const std::int64_t panel_bytes = quant_panel_bytes(format, width, 0), source_bytes = gguf_block_bytes(format);
    const std::int64_t blocks = width / (kRun * layout.block_runs), block_bytes = layout.header + layout.block_runs * layout.run_bytes();
    const bool two_halves = layout.minima;
    each_panel(outputs, panel_bytes, dest, [&](std::int64_t first, int lanes, std::uint8_t* panel) {
        Block parts;
        for (std::int64_t i = 0; i < blocks; ++i) {
            std::uint8_t* block = panel + i * block_bytes;
            for (int lane = 0; lane < lanes; ++lane) {
                const auto* row = static_cast<const std::uint8_t*>(source) + source_row(row_index, first + lane) * src_row_bytes;
                take_apart(format, row + i * source_bytes, parts);
                std::memcpy(block + 2 * lane, parts.d, 2);
                if (two_halves) std::memcpy(block + 32 + 2 * lane, parts.m, 2);
                if (format == Format::q4_k || format == Format::q5_k) {
                    for (int s = 0; s < 8; ++s) {
                        block[64 + 16 * s + lane] = parts.scales[s];
                        block[192 + 16 * s + lane] = parts.minima[s];
                    }
                }
                if (format == Format::q6_k) {
                    for (int s = 0; s < 16; ++s) block[32 + 16 * s + lane] = parts.scales[s];
                }
                for (int run = 0; run < layout.block_runs; ++run) {
                    put_codes(layout.bits, parts.codes + kRun * run, lane, block + layout.header + run * layout.run_bytes());
                }
            }
        }
    });
}

void pack_i8(const std::int8_t* codes, const float* scales, const std::int64_t* row_index, std::int64_t outputs, std::int64_t width,
             std::uint8_t* dest) {
    const QuantLayoutInfo layout = quant_layout(Format::i8);
    each_panel(outputs, quant_panel_bytes(Format::i8, width, 0), dest, [&](std::int64_t first, int lanes, std::uint8_t* panel) {
        std::uint8_t* runs = panel + quant_lead(Format::i8);
        for (int lane = 0; lane < lanes; ++lane) {
            const std::int64_t row = source_row(row_index, first + lane);
            std::memcpy(panel + 4 * lane, scales + row, sizeof(float));
            for (std::int64_t i = 0; i < row_runs(width); ++i) {
                std::uint8_t run[kRun] = {};
                std::memcpy(run, codes + row * width + i * kRun, static_cast<std::size_t>(std::min(kRun, width - i * kRun)));
                put_codes(8, run, lane, runs + i * layout.run_bytes());
            }
        }
    });
}

void pack_w4(const std::uint8_t* codes, const float* scales, const std::uint8_t* zeros, const std::int64_t* row_index, std::int64_t outputs,
             std::int64_t width, std::int64_t group, std::uint8_t* dest) {
    const QuantLayoutInfo layout = quant_layout(Format::w4);
    const std::int64_t panel_bytes = quant_panel_bytes(Format::w4, width, group), groups = group ? width / group : 0, runs = group / kRun;
    each_panel(outputs, panel_bytes, dest, [&](std::int64_t first, int lanes, std::uint8_t* panel) {
        for (std::int64_t i = 0; i < groups; ++i) {
            std::uint8_t* block = panel + i * (layout.header + runs * layout.run_bytes());
            for (int lane = 0; lane < lanes; ++lane) {
                const std::int64_t row = source_row(row_index, first + lane);
                std::memcpy(block + 4 * lane, scales + row * groups + i, sizeof(float));
                block[64 + lane] = zeros[row * groups + i];
                for (std::int64_t run = 0; run < runs; ++run) {
                    put_codes(4, codes + row * width + i * group + run * kRun, lane, block + layout.header + run * layout.run_bytes());
                }
            }
        }
    });
}

void put_q8_0(std::uint8_t* panel, std::int64_t block, int lane, const std::int8_t* codes, std::uint16_t scale) {
    constexpr QuantLayoutInfo layout = quant_layout(Format::q8_0);
    std::uint8_t* place = panel + block * (layout.header + layout.run_bytes());
    std::memcpy(place + 2 * lane, &scale, sizeof scale);
    put_codes(layout.bits, reinterpret_cast<const std::uint8_t*>(codes), lane, place + layout.header);
}

void unpack_quant_rows(const Weights& w, std::int64_t begin, std::int64_t end, float* out, std::int64_t out_stride) {
    const QuantLayoutInfo layout = quant_layout(w.format);
    const std::int64_t panel_bytes = quant_panel_bytes(w.format, w.width, w.group);
    const std::int64_t block_bytes = layout.header + (layout.block_runs ? layout.block_runs : w.group / kRun) * layout.run_bytes();
    for (std::int64_t n = begin; n < end; ++n, out += out_stride) {
        unpack_row(w, block_bytes, w.data + n / kPanelOutputs * panel_bytes, static_cast<int>(n % kPanelOutputs), out);
    }
}

}  // namespace canter
