// The parts of the module canter._native: each area adds its own functions.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "common.h"

namespace canter {

using Address = std::uintptr_t;
using Released = nanobind::call_guard<nanobind::gil_scoped_release>;

template <class T = void>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

inline DType dtype_of(int code) { return static_cast<DType>(code); }

void bind_attention(nanobind::module_& m);
void bind_bench(nanobind::module_& m);
void bind_gemm(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_recurrent(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);

}  // namespace canter
