#include "bind.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "program/instructions.h"
#include "program/program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace canter {
namespace {

Frame frame_of(Address arena, std::int64_t rows, const std::vector<std::int64_t>& slots) { return {at<char>(arena), rows, slots.data()}; }

void run(const Program& program, Address arena, std::int64_t rows, const std::vector<std::int64_t>& slots) {
    program.run(frame_of(arena, rows, slots));
}

void set_stretches(Program& program, const std::vector<std::pair<std::size_t, std::size_t>>& stretches, std::int64_t row_bytes,
                   std::int64_t block_rows) {
    std::vector<Stretch> all;
    for (const auto& [begin, end] : stretches) all.push_back({begin, end});
    program.set_stretches(std::move(all), row_bytes, block_rows);
}

std::vector<double> time_instructions(const Program& program, Address arena, std::int64_t rows, const std::vector<std::int64_t>& slots) {
    return program.time(frame_of(arena, rows, slots));
}

}  // namespace

void bind_program(nb::module_& m) {
    nb::class_<Operand>(m, "Operand")
        .def_static(
            "constant", [](Address address) { return Operand{Operand::Kind::constant, static_cast<std::int64_t>(address), 0}; },
            "address"_a)
        .def_static(
            "arena",
            [](std::int64_t start, std::int64_t offset, std::int64_t row_bytes) {
                return Operand{Operand::Kind::arena, start, offset, row_bytes};
            },
            "start"_a, "offset"_a, "row_bytes"_a)
        .def_static(
            "block", [](std::int64_t start, std::int64_t offset) { return Operand{Operand::Kind::block, start, offset}; }, "start"_a,
            "offset"_a)
        .def_static("slot", [](std::int64_t index) { return Operand{Operand::Kind::slot, index, 0}; }, "index"_a);
    nb::class_<Program> program(m, "Program");
    program.def(nb::init<>())
        .def("run", &run, Released(), "arena"_a, "rows"_a, "slots"_a)
        .def("time", &time_instructions, Released(), "arena"_a, "rows"_a, "slots"_a)
        .def("set_stretches", &set_stretches, "stretches"_a, "row_bytes"_a, "block_rows"_a)
        .def("names", &Program::names);
    bind_dense_instructions(program);
    bind_attention_instructions(program);
    bind_packed_instructions(program);
    bind_recurrent_instructions(m, program);
}

}  // namespace canter
