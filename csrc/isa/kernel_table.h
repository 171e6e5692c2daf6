// What each instruction set provides: functions over a range of rows, on one thread. Which of them run is decided once,
// at run time; how work is split over threads is the drivers' business (norm/norm.cpp and its like).
#pragma once

#include <cstdint>

#include "activation/activation.h"
#include "heads/heads.h"
#include "norm/norm.h"
#include "quant/dequantize.h"
#include "recurrent/recurrent.h"
#include "rope/rotary.h"
#include "streams/streams.h"

namespace canter {

struct KernelTable {
    void (*rms_norm)(const NormArgs&, std::int64_t begin, std::int64_t end);
    void (*layer_norm)(const LayerNormArgs&, std::int64_t begin, std::int64_t end);
    void (*sparse_relu)(const SparseReluArgs&, std::int64_t begin, std::int64_t end);
    void (*mix_streams)(const StreamArgs&, std::int64_t begin, std::int64_t end);
    void (*add_to_streams)(const StreamArgs&, std::int64_t begin, std::int64_t end);
    void (*match_streams)(const StreamArgs&, std::int64_t begin, std::int64_t end);
    // Over heads, and the rows of each.
    void (*head_linear)(const HeadLinearArgs&, std::int64_t begin, std::int64_t end);
    void (*gated)(const GatedArgs&, std::int64_t begin, std::int64_t end);
    void (*pointwise)(const PointwiseArgs&, std::int64_t begin, std::int64_t end);
    void (*softcap)(const SoftcapArgs&, std::int64_t begin, std::int64_t end);
    void (*rotary)(const RotaryArgs&, std::int64_t begin, std::int64_t end);
    // x *= factor, in place.
    void (*scale)(void* x, DType type, std::int64_t count, float factor);
    void (*dequantize)(const DequantizeArgs&, std::int64_t begin, std::int64_t end);
    void (*l2_norm)(const L2NormArgs&, std::int64_t begin, std::int64_t end);
    void (*decay_gate)(const DecayArgs&, std::int64_t begin, std::int64_t end);
    void (*gated_rms_norm)(const GatedNormArgs&, std::int64_t begin, std::int64_t end);
    // Over tasks: tiles of `tile_width` columns of one request's state.
    void (*causal_conv)(const ConvArgs&, std::int64_t begin, std::int64_t end);
    void (*ssd_scan)(const SsdArgs&, std::int64_t begin, std::int64_t end);
    void (*selective_scan)(const SelectiveArgs&, std::int64_t begin, std::int64_t end);
    void (*gated_delta)(const DeltaArgs&, std::int64_t begin, std::int64_t end);
    std::int64_t tile_width;
};

// Tables of the instruction sets that were compiled in; only those that this machine supports may be used.
extern const KernelTable kScalarKernels;
#if defined(CANTER_X86)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#elif defined(CANTER_ARM)
extern const KernelTable kNeonKernels;
#endif

}  // namespace canter
