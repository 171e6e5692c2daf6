// Instructions for recurrent layers.

#include <nanobind/stl/optional.h>

#include <optional>

#include "recurrent/recurrent.h"

#include "program/instructions.h"

namespace nb = nanobind;

namespace canter {
namespace {

// The plan of a run: its tensors are metadata of the step, and `requests` names the slot of their number.
struct PlanOperands {
    Operand segment_start, ends, read, write;
    std::int64_t requests;

    RecurrentPlan at(const Frame& frame, std::int64_t slots) const {
        return {segment_start.at<std::int32_t>(frame), ends.at<std::int32_t>(frame), read.at<std::int32_t>(frame),
                write.at<std::int32_t>(frame), frame.slots[requests], frame.rows, slots};
    }
};

// A tensor that may be absent.
using Maybe = std::optional<Operand>;

void* maybe_at(const Maybe& operand, const Frame& frame) { return operand ? operand->at(frame) : nullptr; }

void add_causal_conv(Program& program, const PlanOperands& plan, Operand x, Maybe gate_in, Maybe gate_out, int type, std::int64_t x_stride,
                     std::int64_t gate_in_stride, std::int64_t gate_out_stride, Address weight, Address bias, Address state, Operand out,
                     std::int64_t slots, std::int64_t channels, std::int64_t taps, bool silu) {
    const ConvArgs args{nullptr, nullptr, nullptr, x_stride, gate_in_stride, gate_out_stride, at<float>(weight), at<float>(bias),
                        at(state), nullptr, dtype_of(type), channels, taps, silu, {}};
    program.add("causal_conv", [=](const Frame& frame) {
        ConvArgs now = args;
        now.x = x.at(frame);
        now.gate_in = maybe_at(gate_in, frame);
        now.gate_out = maybe_at(gate_out, frame);
        now.out = out.at(frame);
        now.plan = plan.at(frame, slots);
        causal_conv(now);
    });
}

void add_ssd_scan(Program& program, const PlanOperands& plan, Operand x, Operand b, Operand c, int type, std::int64_t x_stride,
                  std::int64_t b_stride, std::int64_t c_stride, Maybe dt, int dt_type, std::int64_t dt_stride, Address dt_bias, Address a,
                  Address d, Address state, Operand out, std::int64_t slots, std::int64_t heads, std::int64_t groups, std::int64_t depth,
                  std::int64_t width, float dt_min, float dt_max) {
    const SsdArgs args{nullptr, nullptr, nullptr, x_stride, b_stride, c_stride, nullptr, dt_stride, at<float>(dt_bias), at<float>(a),
                       at<float>(d), at<float>(state), nullptr, dtype_of(type), dtype_of(dt_type), heads, groups, depth, width, dt_min,
                       dt_max, {}};
    program.add("ssd_scan", [=](const Frame& frame) {
        SsdArgs now = args;
        now.x = x.at(frame);
        now.b = b.at(frame);
        now.c = c.at(frame);
        now.dt = maybe_at(dt, frame);
        now.out = out.at(frame);
        now.plan = plan.at(frame, slots);
        ssd_scan(now);
    });
}

void add_selective_scan(Program& program, const PlanOperands& plan, Operand x, Operand dt, Operand b, Operand c, Maybe gate, int type,
                        std::int64_t x_stride, std::int64_t dt_stride, std::int64_t b_stride, std::int64_t c_stride,
                        std::int64_t gate_stride, Address dt_bias, Address a, Address d, Address state, Operand out, std::int64_t slots,
                        std::int64_t depth, std::int64_t width) {
    const SelectiveArgs args{nullptr, nullptr, nullptr, nullptr, nullptr, x_stride, dt_stride, b_stride, c_stride, gate_stride,
                             at<float>(dt_bias), at<float>(a), at<float>(d), at<float>(state), nullptr, dtype_of(type), depth, width, {}};
    program.add("selective_scan", [=](const Frame& frame) {
        SelectiveArgs now = args;
        now.x = x.at(frame);
        now.dt = dt.at(frame);
        now.b = b.at(frame);
        now.c = c.at(frame);
        now.gate = maybe_at(gate, frame);
        now.out = out.at(frame);
        now.plan = plan.at(frame, slots);
        selective_scan(now);
    });
}

void add_gated_delta(Program& program, const PlanOperands& plan, Operand q, Operand k, Operand v, Operand beta, Operand decay, int type,
                     int beta_type, std::int64_t q_stride, std::int64_t k_stride, std::int64_t v_stride, std::int64_t beta_stride,
                     Address state, Operand out, std::int64_t slots, std::int64_t heads, std::int64_t groups, std::int64_t depth,
                     std::int64_t width, bool each_channel, float beta_scale) {
    const DeltaArgs args{nullptr, nullptr, q_stride, k_stride, nullptr, nullptr, v_stride, beta_stride, nullptr, at<float>(state), nullptr,
                         dtype_of(type), dtype_of(beta_type), heads, groups, depth, width, each_channel, beta_scale, {}};
    program.add("gated_delta", [=](const Frame& frame) {
        DeltaArgs now = args;
        now.q = q.at<float>(frame);
        now.k = k.at<float>(frame);
        now.v = v.at(frame);
        now.beta = beta.at(frame);
        now.decay = decay.at<float>(frame);
        now.out = out.at(frame);
        now.plan = plan.at(frame, slots);
        gated_delta(now);
    });
}

void add_l2_norm(Program& program, Operand x, Operand out, int type, std::int64_t heads, std::int64_t width, std::int64_t x_stride,
                 float eps, float scale) {
    program.add("l2_norm", [=](const Frame& frame) {
        l2_norm({x.at(frame), out.at<float>(frame), dtype_of(type), frame.rows, heads, width, x_stride, eps, scale});
    });
}

void add_decay_gate(Program& program, Operand x, Address a, Address bias, Operand out, int type, std::int64_t heads, std::int64_t width,
                    std::int64_t x_stride, float lower_bound) {
    program.add("decay_gate", [=](const Frame& frame) {
        decay_gate({x.at(frame), at<float>(a), at<float>(bias), out.at<float>(frame), dtype_of(type), frame.rows, heads, width, x_stride,
                    lower_bound});
    });
}

void add_gated_rms_norm(Program& program, Operand x, Operand gate, Address weight, Operand out, int type, std::int64_t x_stride,
                        std::int64_t gate_stride, std::int64_t width, std::int64_t group, bool shared_weight, bool gate_first, bool sigmoid,
                        float eps) {
    program.add("gated_rms_norm", [=](const Frame& frame) {
        gated_rms_norm({x.at(frame), gate.at(frame), x_stride, gate_stride, at<float>(weight), out.at(frame), dtype_of(type), frame.rows,
                        width, group, shared_weight, gate_first, sigmoid, eps});
    });
}

}  // namespace

void bind_recurrent_instructions(nb::module_& m, nb::class_<Program>& program) {
    nb::class_<PlanOperands>(m, "PlanOperands")
        .def("__init__", [](PlanOperands* self, Operand segment_start, Operand ends, Operand read, Operand write, std::int64_t requests) {
            new (self) PlanOperands{segment_start, ends, read, write, requests};
        });
    program.def("causal_conv", &add_causal_conv)
        .def("ssd_scan", &add_ssd_scan)
        .def("selective_scan", &add_selective_scan)
        .def("gated_delta", &add_gated_delta)
        .def("l2_norm", &add_l2_norm)
        .def("decay_gate", &add_decay_gate)
        .def("gated_rms_norm", &add_gated_rms_norm);
}

}  // namespace canter
