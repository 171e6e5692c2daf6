#include "bind.h"

namespace canter {

void bind_sampling(nanobind::module_&) {}

}  // namespace canter
