#include "bind.h"

namespace canter {

void bind_program(nanobind::module_&) {}

}  // namespace canter
