#include "program/program.h"

#include <chrono>
#include <stdexcept>
#include <utility>

namespace canter {

void Program::add(std::string name, Instruction run) {
    names_.push_back(std::move(name));
    instructions_.push_back(std::move(run));
}

void Program::set_stretches(std::vector<Stretch> stretches, std::int64_t row_bytes, std::int64_t block_rows) {
    std::size_t end = 0;
    for (const Stretch& stretch : stretches) {
        if (stretch.begin < end || stretch.end < stretch.begin || stretch.end > instructions_.size()) {
            throw std::invalid_argument("Program: stretches must be in order, apart and within its instructions.");
        }
        end = stretch.end;
    }
    if (block_rows < 1) throw std::invalid_argument("Program: a block needs rows.");
    stretches_ = std::move(stretches);
    row_bytes_ = row_bytes;
    block_rows_ = block_rows;
}

// each(index of an instruction, the frame that it is run with), in order.
template <class Each>
void Program::walk(const Frame& frame, const Each& each) const {
    Frame block = frame;
    block.block = frame.arena + row_bytes_ * frame.rows;
    const std::int64_t blocks = (frame.rows + block_rows_ - 1) / block_rows_;
    std::size_t next = 0;
    const auto up_to = [&](std::size_t end) {
        for (; next < end; ++next) each(next, frame);
    };
    for (const Stretch& stretch : stretches_) {
        up_to(stretch.begin);
        for (std::int64_t n = 0; n < blocks; ++n) {
            block.first = frame.rows * n / blocks;
            block.rows = frame.rows * (n + 1) / blocks - block.first;
            for (std::size_t i = stretch.begin; i < stretch.end; ++i) each(i, block);
        }
        next = stretch.end;
    }
    up_to(instructions_.size());
}

void Program::run(const Frame& frame) const {
    walk(frame, [&](std::size_t i, const Frame& now) { instructions_[i](now); });
}

std::vector<double> Program::time(const Frame& frame) const {
    using Clock = std::chrono::steady_clock;
    std::vector<double> seconds(instructions_.size());
    walk(frame, [&](std::size_t i, const Frame& now) {
        const auto start = Clock::now();
        instructions_[i](now);
        seconds[i] += std::chrono::duration<double>(Clock::now() - start).count();
    });
    return seconds;
}

}  // namespace canter
