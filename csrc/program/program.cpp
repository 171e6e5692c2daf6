#include "program/program.h"

#include <chrono>
#include <utility>

namespace canter {

void Program::add(std::string name, Instruction run) {
    names_.push_back(std::move(name));
    instructions_.push_back(std::move(run));
}

void Program::run(const Frame& frame) const {
    for (const Instruction& instruction : instructions_) instruction(frame);
}

std::vector<double> Program::time(const Frame& frame) const {
    using Clock = std::chrono::steady_clock;
    std::vector<double> seconds;
    seconds.reserve(instructions_.size());
    for (const Instruction& instruction : instructions_) {
        const auto start = Clock::now();
        instruction(frame);
        seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
    return seconds;
}

}  // namespace canter
