#include "bind.h"

#include "gemm/linear.h"

namespace nb = nanobind;

namespace canter {
namespace {

void bind_linear(Address x, int x_type, Address weight, int weight_type, Address bias, int bias_type, Address out, std::int64_t rows,
                 std::int64_t outputs, std::int64_t width) {
    linear({at(x), dtype_of(x_type), at(weight), dtype_of(weight_type), at(bias), dtype_of(bias_type), at(out), rows, outputs, width});
}

}  // namespace

void bind_gemm(nb::module_& m) {
    m.def("linear", &bind_linear, Released());
}

}  // namespace canter
