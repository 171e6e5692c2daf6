// Layers whose memory does not grow with the text: short convolutions, state-space scans, the gated delta rule.
//
// All walk a request's rows one by one with the same arithmetic for a prompt and for a single token, so that a result does not
// depend on how a text is cut into steps. What would make that slow is avoided in the loops: a tile of the state stays in
// registers or in the first-level cache while rows pass.
#pragma once

#include <cstdint>

#include "common.h"

namespace canter {

// Which rows are whose, and where states lie; see canter/kernels/recurrent_plan.py.
struct RecurrentPlan {
    const std::int32_t* segment_start;  // [requests + 1]
    const std::int32_t* ends;           // [segments]
    const std::int32_t* read;           // [requests]
    const std::int32_t* write;          // [segments]
    std::int64_t requests, rows, slots;
};

inline constexpr std::int64_t kMaxTaps = 8;
inline constexpr std::int64_t kMaxStateRows = 256;

struct ConvArgs {
    const void *x, *gate_in, *gate_out;  // [rows, channels], rows x_stride and so on apart; gates may be null
    std::int64_t x_stride, gate_in_stride, gate_out_stride;
    const float *weight, *bias;  // [taps, channels], [channels] or null
    void* state;                 // [slots, taps - 1, channels]
    void* out;                   // [rows, channels]
    DType type;
    std::int64_t channels, taps;
    bool silu;
    RecurrentPlan plan;
};

struct SsdArgs {
    const void *x, *b, *c;  // [rows, heads, width], [rows, groups, depth] twice, rows so many elements apart
    std::int64_t x_stride, b_stride, c_stride;
    const void* dt;  // [rows, heads], or null: 1
    std::int64_t dt_stride;
    const float *dt_bias, *a, *d;  // [heads]; dt_bias and d may be null
    float* state;                  // [slots, heads, depth, width]
    void* out;                     // [rows, heads, width]
    DType type, dt_type;
    std::int64_t heads, groups, depth, width;
    float dt_min, dt_max;
    RecurrentPlan plan;
};

struct SelectiveArgs {
    const void *x, *dt, *b, *c, *gate;  // [rows, width] twice, [rows, depth] twice, [rows, width] or null
    std::int64_t x_stride, dt_stride, b_stride, c_stride, gate_stride;
    const float *dt_bias, *a, *d;  // [width] or null, [depth, width], [width] or null
    float* state;                  // [slots, depth, width]
    void* out;                     // [rows, width]
    DType type;
    std::int64_t depth, width;
    RecurrentPlan plan;
};

struct DeltaArgs {
    const float *q, *k;  // [rows, groups, depth]
    std::int64_t q_stride, k_stride;
    const void *v, *beta;  // [rows, heads, width], [rows, heads]
    std::int64_t v_stride, beta_stride;
    const float* decay;  // [rows, heads, 1 or depth]
    float* state;        // [slots, heads, depth, width]
    void* out;           // [rows, heads, width]
    DType type, beta_type;
    std::int64_t heads, groups, depth, width;
    bool each_channel;
    float beta_scale;
    RecurrentPlan plan;
};

struct L2NormArgs {
    const void* x;  // [rows, heads, width], rows x_stride apart
    float* out;
    DType type;
    std::int64_t rows, heads, width, x_stride;
    float eps, scale;
};

struct DecayArgs {
    const void* x;  // [rows, heads, width], rows x_stride apart
    const float *a, *bias;  // [heads], [heads, width]
    float* out;
    DType type;
    std::int64_t rows, heads, width, x_stride;
    float lower_bound;
};

struct GatedNormArgs {
    const void *x, *gate;  // [rows, width], rows so many elements apart
    std::int64_t x_stride, gate_stride;
    const float* weight;  // [width], or [group] for all groups alike
    void* out;
    DType type;
    std::int64_t rows, width, group;
    bool shared_weight, gate_first, sigmoid;
    float eps;
};

// Raise std::invalid_argument for a plan whose rows or slots lie outside.
void causal_conv(const ConvArgs& args);
void ssd_scan(const SsdArgs& args);
void selective_scan(const SelectiveArgs& args);
void gated_delta(const DeltaArgs& args);

void l2_norm(const L2NormArgs& args);
void decay_gate(const DecayArgs& args);
void gated_rms_norm(const GatedNormArgs& args);

}  // namespace canter
