#include "bind.h"

#include <nanobind/stl/string.h>

#include "bench/limits.h"

namespace canter {

void bind_bench(nanobind::module_& m) {
    m.def("read_bandwidth", &read_bandwidth, Released());
    m.def("peak_operations", &peak_operations, Released());
}

}  // namespace canter
