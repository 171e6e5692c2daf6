#include "bind.h"

#include "recurrent/recurrent.h"

namespace nb = nanobind;

namespace canter {
namespace {

// Where a plan's tensors lie. How many rows and slots there are comes with each call.
struct PlanAddresses {
    Address segment_start, ends, read, write;
    std::int64_t requests;

    RecurrentPlan with(std::int64_t rows, std::int64_t slots) const {
        return {at<std::int32_t>(segment_start), at<std::int32_t>(ends), at<std::int32_t>(read), at<std::int32_t>(write), requests, rows,
                slots};
    }
};

void bind_causal_conv(const PlanAddresses& plan, Address x, Address gate_in, Address gate_out, int type, std::int64_t x_stride,
                      std::int64_t gate_in_stride, std::int64_t gate_out_stride, Address weight, Address bias, Address state, Address out,
                      std::int64_t rows, std::int64_t slots, std::int64_t channels, std::int64_t taps, bool silu) {
    causal_conv({at(x), at(gate_in), at(gate_out), x_stride, gate_in_stride, gate_out_stride, at<float>(weight), at<float>(bias), at(state),
                 at(out), dtype_of(type), channels, taps, silu, plan.with(rows, slots)});
}

void bind_ssd_scan(const PlanAddresses& plan, Address x, Address b, Address c, int type, std::int64_t x_stride, std::int64_t b_stride,
                   std::int64_t c_stride, Address dt, int dt_type, std::int64_t dt_stride, Address dt_bias, Address a, Address d,
                   Address state, Address out, std::int64_t rows, std::int64_t slots, std::int64_t heads, std::int64_t groups,
                   std::int64_t depth, std::int64_t width, float dt_min, float dt_max) {
    ssd_scan({at(x), at(b), at(c), x_stride, b_stride, c_stride, at(dt), dt_stride, at<float>(dt_bias), at<float>(a), at<float>(d),
              at<float>(state), at(out), dtype_of(type), dtype_of(dt_type), heads, groups, depth, width, dt_min, dt_max,
              plan.with(rows, slots)});
}

void bind_selective_scan(const PlanAddresses& plan, Address x, Address dt, Address b, Address c, Address gate, int type,
                         std::int64_t x_stride, std::int64_t dt_stride, std::int64_t b_stride, std::int64_t c_stride,
                         std::int64_t gate_stride, Address dt_bias, Address a, Address d, Address state, Address out, std::int64_t rows,
                         std::int64_t slots, std::int64_t depth, std::int64_t width) {
    selective_scan({at(x), at(dt), at(b), at(c), at(gate), x_stride, dt_stride, b_stride, c_stride, gate_stride, at<float>(dt_bias),
                    at<float>(a), at<float>(d), at<float>(state), at(out), dtype_of(type), depth, width, plan.with(rows, slots)});
}

void bind_gated_delta(const PlanAddresses& plan, Address q, Address k, Address v, Address beta, Address decay, int type, int beta_type,
                      std::int64_t q_stride, std::int64_t k_stride, std::int64_t v_stride, std::int64_t beta_stride, Address state,
                      Address out, std::int64_t rows, std::int64_t slots, std::int64_t heads, std::int64_t groups, std::int64_t depth,
                      std::int64_t width, bool each_channel, float beta_scale) {
    gated_delta({at<float>(q), at<float>(k), q_stride, k_stride, at(v), at(beta), v_stride, beta_stride, at<float>(decay),
                 at<float>(state), at(out), dtype_of(type), dtype_of(beta_type), heads, groups, depth, width, each_channel, beta_scale,
                 plan.with(rows, slots)});
}

void bind_l2_norm(Address x, Address out, int type, std::int64_t rows, std::int64_t heads, std::int64_t width, std::int64_t x_stride,
                  float eps, float scale) {
    l2_norm({at(x), at<float>(out), dtype_of(type), rows, heads, width, x_stride, eps, scale});
}

void bind_decay_gate(Address x, Address a, Address bias, Address out, int type, std::int64_t rows, std::int64_t heads, std::int64_t width,
                     std::int64_t x_stride, float lower_bound) {
    decay_gate({at(x), at<float>(a), at<float>(bias), at<float>(out), dtype_of(type), rows, heads, width, x_stride, lower_bound});
}

void bind_gated_rms_norm(Address x, Address gate, Address weight, Address out, int type, std::int64_t x_stride, std::int64_t gate_stride,
                         std::int64_t rows, std::int64_t width, std::int64_t group, bool shared_weight, bool gate_first, bool sigmoid,
                         float eps) {
    gated_rms_norm({at(x), at(gate), x_stride, gate_stride, at<float>(weight), at(out), dtype_of(type), rows, width, group, shared_weight,
                    gate_first, sigmoid, eps});
}

}  // namespace

void bind_recurrent(nb::module_& m) {
    nb::class_<PlanAddresses>(m, "RecurrentPlan")
        .def("__init__", [](PlanAddresses* self, Address segment_start, Address ends, Address read, Address write, std::int64_t requests) {
            new (self) PlanAddresses{segment_start, ends, read, write, requests};
        });
    m.def("causal_conv", &bind_causal_conv, Released());
    m.def("ssd_scan", &bind_ssd_scan, Released());
    m.def("selective_scan", &bind_selective_scan, Released());
    m.def("gated_delta", &bind_gated_delta, Released());
    m.def("l2_norm", &bind_l2_norm, Released());
    m.def("decay_gate", &bind_decay_gate, Released());
    m.def("gated_rms_norm", &bind_gated_rms_norm, Released());
}

}  // namespace canter
