// How the attention of one step is cut into tasks: made once, used by every layer of a state group.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/attention.h"

namespace canter {

// One piece of work: all spans of a tile, or, where a tile is shared among tasks, some of them.
struct AttentionTask {
    AttentionTile tile;
    std::int64_t partial;  // floats before the results of the tile's first span; -1: the task finishes its rows itself
    std::int64_t whole;  // index of the shared tile
};

// A tile that several tasks share; the last of them to end merges its spans.
struct SharedTile {
    AttentionTile tile;
    std::int64_t partial;
    std::int64_t tasks;
};

class AttentionPlan {
public:
    // Cut a step up for the threads there are. Checks lengths and block tables: throws std::out_of_range where they do not fit.
    // The step's arrays must outlive the plan's use.
    void make(const AttentionStep& step);

    const AttentionStep& step() const { return step_; }
    const std::vector<AttentionTask>& tasks() const { return tasks_; }
    const std::vector<SharedTile>& shared() const { return shared_; }
    std::int64_t covered() const { return covered_; }  // rows that belong to a request
    std::int64_t max_rows() const { return max_rows_; }  // of a tile
    std::int64_t partial_floats() const { return partial_floats_; }
    std::int64_t work() const { return work_; }  // multiply-adds

    // Tasks of a shared tile that have yet to end.
    std::atomic<std::int64_t>& left(std::int64_t shared) { return left_[static_cast<std::size_t>(shared)]; }

private:
    void add_request(std::int64_t request, std::int64_t most_tokens, std::int64_t target);
    void add_tile(const AttentionTile& tile, std::int64_t target);

    AttentionStep step_{};
    std::vector<AttentionTask> tasks_;
    std::vector<SharedTile> shared_;
    std::unique_ptr<std::atomic<std::int64_t>[]> left_;
    std::size_t left_size_ = 0;
    std::int64_t covered_ = 0, max_rows_ = 0, partial_floats_ = 0, work_ = 0;
};

}  // namespace canter
