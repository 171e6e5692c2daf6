#include "bind.h"

namespace canter {

void bind_bench(nanobind::module_&) {}

}  // namespace canter
