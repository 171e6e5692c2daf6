// A model's forward as a list of native calls. It is recorded once, with everything bound that does not vary from step
// to step; what does vary (rows, requests, where the step's metadata and the arena lie) comes with each run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace canter {

// What an instruction works on: `rows` rows from `first` on of a run of `all_rows`, the arena, and the step's metadata, addresses
// and sizes alike, by slot. All rows at once but in a stretch, whose own buffers begin at `block`.
struct Frame {
    char* arena;
    std::int64_t rows;
    const std::int64_t* slots;
    char* block = nullptr;
    std::int64_t first = 0, all_rows = rows;
};

// Where an instruction finds a tensor. An arena buffer begins `value` bytes per row into the arena: buffers lie one
// after the other, however many rows there are; its rows are `row_bytes` apart. A buffer of a stretch holds the rows of a block
// alone. `offset` is where a view begins within its tensor's row, in bytes.
struct Operand {
    enum class Kind : int { constant, arena, block, slot };
    Kind kind;
    std::int64_t value;
    std::int64_t offset;
    std::int64_t row_bytes = 0;

    template <class T = void>
    T* at(const Frame& frame) const {
        return reinterpret_cast<T*>(base(frame) + offset);
    }

private:
    std::int64_t base(const Frame& frame) const {
        switch (kind) {
            case Kind::constant: return value;
            case Kind::arena: return reinterpret_cast<std::int64_t>(frame.arena) + value * frame.all_rows + frame.first * row_bytes;
            case Kind::block: return reinterpret_cast<std::int64_t>(frame.block) + value * frame.rows;
            case Kind::slot: return frame.slots[value];
        }
        return 0;
    }
};

// Instructions [begin, end) whose rows don't know of each other: all of them are run for a block of rows, then for the next. So
// what they hand on to each other need not hold all rows, and stays in the caches.
struct Stretch {
    std::size_t begin, end;
};

class Program {
public:
    using Instruction = std::function<void(const Frame&)>;

    void add(std::string name, Instruction run);

    // `stretches` are in order, apart, and run for at most `block_rows` rows at a time; their buffers lie in the arena behind
    // `row_bytes` for each row of the run.
    void set_stretches(std::vector<Stretch> stretches, std::int64_t row_bytes, std::int64_t block_rows);

    // Run every instruction, in order, on this thread; they use the pool. An instruction's exception ends the run and
    // leaves the program as it was. One thread at a time: instructions share what they work out about a step.
    void run(const Frame& frame) const;

    // The same, with the seconds that each instruction took.
    std::vector<double> time(const Frame& frame) const;

    const std::vector<std::string>& names() const { return names_; }

private:
    template <class Each>
    void walk(const Frame& frame, const Each& each) const;

    std::vector<std::string> names_;
    std::vector<Instruction> instructions_;
    std::vector<Stretch> stretches_;
    std::int64_t row_bytes_ = 0, block_rows_ = 1;
};

}  // namespace canter
