// Weight matrices as the kernels read them: packed into panels of sixteen outputs.
//
// A matrix W[outputs, width] of one format is a run of panels. A panel holds the weights of sixteen neighbouring outputs,
// in the order in which a kernel walks along the width; the last panel is filled up with zeros. How a panel looks inside
// is the business of its format's kernels; a lane of a vector is an output there, so no kernel ever sums across lanes.
#pragma once

#include <cstdint>
#include <string>

#include "common.h"

namespace canter {

// i8: one scale an output. w4: unsigned codes of four bits, a scale and a zero for every `group` elements. The others are
// the blocks of GGUF files, with their codes and scales as the file has them; floats can be rounded to q8_0 too.
enum class Format : int { f32, bf16, i8, w4, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, count };

inline constexpr std::int64_t kPanelOutputs = 16;
inline constexpr std::int64_t kMaxWidth = std::int64_t{1} << 31;

// A packed matrix of one format. `data` is aligned to 64 bytes. `group`: elements that share a scale (w4), otherwise 0.
struct Weights {
    Format format;
    const std::uint8_t* data;
    std::int64_t outputs, width, group;
};

const char* format_name(Format format);

// Throws std::invalid_argument for an unknown name.
Format format_named(const std::string& name);

// What a width must be a multiple of: the elements of a block. The last block of i8 and q8_0 may be filled up with zeros.
std::int64_t width_multiple(Format format);

// Bytes of one panel. Throws std::invalid_argument for a width that the format can't hold.
std::int64_t panel_bytes(Format format, std::int64_t width, std::int64_t group);

inline std::int64_t num_panels(std::int64_t outputs) { return (outputs + kPanelOutputs - 1) / kPanelOutputs; }

}  // namespace canter
