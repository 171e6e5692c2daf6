// What each instruction set provides for attention, on one thread.
#pragma once

#include "attention/attention.h"

namespace canter {

struct AttentionKernels {
    void (*write_kv)(const WriteKVArgs&, std::int64_t begin, std::int64_t end);
    std::int64_t (*scratch)(const AttentionStep&, std::int64_t rows);  // floats that a tile of so many rows needs
    // Attend over the spans of a tile. `partial` null: write its rows' results. Otherwise leave what each span gives there,
    // the tile's first span first.
    void (*attend)(const AttentionArgs&, const AttentionStep&, const AttentionTile&, float* partial, float* scratch);
    // Merge what the spans of a whole tile left behind, and write its rows' results.
    void (*merge)(const AttentionArgs&, const AttentionStep&, const AttentionTile&, const float* partial, float* scratch);
};

extern const AttentionKernels kScalarAttention;
#if defined(CANTER_X86)
extern const AttentionKernels kAvx2Attention;
extern const AttentionKernels kAvx512Attention;
#elif defined(CANTER_ARM)
extern const AttentionKernels kNeonAttention;
#endif

}  // namespace canter
