// A model's forward as a list of native calls. It is recorded once, with everything bound that does not vary from step
// to step; what does vary (rows, requests, where the step's metadata and the arena lie) comes with each run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace canter {

// One run: `rows` tokens, an arena with room for them, and the step's metadata, addresses and sizes alike, by slot.
struct Frame {
    char* arena;
    std::int64_t rows;
    const std::int64_t* slots;
};

// Where an instruction finds a tensor. An arena buffer begins `value` bytes per row into the arena: buffers lie one
// after the other, however many rows there are. `offset` is where a view begins within its tensor's row, in bytes.
struct Operand {
    enum class Kind : int { constant, arena, slot };
    Kind kind;
    std::int64_t value;
    std::int64_t offset;

    template <class T = void>
    T* at(const Frame& frame) const {
        const std::int64_t base = kind == Kind::constant ? value
                                  : kind == Kind::arena  ? reinterpret_cast<std::int64_t>(frame.arena) + value * frame.rows
                                                         : frame.slots[value];
        return reinterpret_cast<T*>(base + offset);
    }
};

class Program {
public:
    using Instruction = std::function<void(const Frame&)>;

    void add(std::string name, Instruction run);

    // Run every instruction, in order, on this thread; they use the pool. An instruction's exception ends the run and
    // leaves the program as it was. One thread at a time: instructions share what they work out about a step.
    void run(const Frame& frame) const;

    // The same, with the seconds that each instruction took.
    std::vector<double> time(const Frame& frame) const;

    const std::vector<std::string>& names() const { return names_; }

private:
    std::vector<std::string> names_;
    std::vector<Instruction> instructions_;
};

}  // namespace canter
