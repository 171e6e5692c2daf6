// The one thread pool. Workers start at the first parallel region, spin briefly between regions and then sleep.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace canter {

// Processors that this process may use: its affinity mask, cut by the CPU quota of its control groups. At least 1.
int default_num_threads();

int num_threads();

// Threads that work on a region, the caller included. Throws std::invalid_argument below 1.
void set_num_threads(int count);

using Task = void (*)(const void* context, std::int64_t index);

// Run task(context, i) for every i in [0, count), in any order and on any thread; returns when all are done. A region
// that starts while another runs (a second Python thread) runs on its caller alone. Tasks must not throw.
void run_tasks(std::int64_t count, Task task, const void* context);

template <class F>
void parallel_for(std::int64_t count, const F& body) {
    run_tasks(count, [](const void* context, std::int64_t index) { (*static_cast<const F*>(context))(index); }, &body);
}

// Where the threads that share a stretch find what is to be done next: in the low kItemBits the number of the next item, above them
// that of the region it is of. Where the region is an older one, nothing has been taken yet but item 0.
struct alignas(64) NextItem {
    std::atomic<std::uint64_t> value{0};
};
inline constexpr int kItemBits = 20;  // what is left counts regions for years

// Gives the items of a stretch, numbered from 0, to whoever asks first. Item 0 is the owner's without asking, for it takes time to
// fetch from another processor what it has written to.
class Items {
public:
    // `next`: null where nobody else takes any.
    Items(NextItem* next, std::uint64_t region, bool owner) : next_(next), region_(region << kItemBits), first_(owner) {}

    std::int64_t take() {
        if (first_) {
            first_ = false;
            if (next_) __builtin_prefetch(&next_->value, 1, 3);
            return 0;
        }
        if (!next_) return alone_++;
        std::uint64_t value = next_->value.load(std::memory_order_relaxed), next;
        do {
            next = value >> kItemBits == region_ >> kItemBits ? value : region_ | 1;
        } while (!next_->value.compare_exchange_weak(value, next + 1, std::memory_order_relaxed));
        return static_cast<std::int64_t>(next - region_);
    }

private:
    NextItem* next_;
    std::uint64_t region_;
    bool first_;
    std::int64_t alone_ = 1;
};

inline constexpr std::int64_t kMostStretches = 64;

using StretchTask = void (*)(const void* context, std::int64_t stretch, Items& items);

// Run task(context, s, items) for every stretch s in [0, stretches), at most kMostStretches, by several threads each: a task returns
// when it is given an item that is none of the stretch's. A thread begins with a stretch of its own, as it is meant to read on where it
// left off, and then helps with the others. Otherwise as run_tasks.
void run_stretches(std::int64_t stretches, StretchTask task, const void* context);

template <class F>
void parallel_stretches(std::int64_t stretches, const F& body) {
    const StretchTask task = [](const void* context, std::int64_t stretch, Items& items) {
        (*static_cast<const F*>(context))(stretch, items);
    };
    run_stretches(stretches, task, &body);
}

// This thread's scratch memory, 64-byte aligned, kept between calls. One live buffer per thread and slot.
enum class Scratch { caller = 0, task = 1 };
float* scratch_floats(Scratch slot, std::size_t count);

}  // namespace canter
