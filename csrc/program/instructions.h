// The instructions of a program, one method of the Python class each. A file binds those of one area.
#pragma once

#include <nanobind/stl/string.h>

#include "bind.h"
#include "program/program.h"

namespace canter {

void bind_dense_instructions(nanobind::class_<Program>& program);
void bind_attention_instructions(nanobind::class_<Program>& program);
void bind_packed_instructions(nanobind::class_<Program>& program);
void bind_recurrent_instructions(nanobind::module_& m, nanobind::class_<Program>& program);

}  // namespace canter
