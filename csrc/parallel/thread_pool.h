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

inline constexpr std::int64_t kMostStretches = 64;

// body(s, next) for stretches s in [0, stretches), at most kMostStretches of them, by several threads each: next() gives what is to
// be done, numbered 0, 1, ... within the stretch, to whoever asks first, and body returns when it has been given all there is. A
// thread begins with a stretch of its own, as it is meant to read on where it left off, and then helps with the others.
template <class F>
void parallel_stretches(std::int64_t stretches, const F& body) {
    struct alignas(64) Next {
        std::atomic<std::int64_t> item{0};
    };
    Next next[kMostStretches];
    parallel_for(stretches, [&](std::int64_t first) {
        for (std::int64_t n = 0; n < stretches; ++n) {
            const std::int64_t stretch = (first + n) % stretches;
            body(stretch, [&] { return next[stretch].item.fetch_add(1, std::memory_order_relaxed); });
        }
    });
}

// This thread's scratch memory, 64-byte aligned, kept between calls. One live buffer per thread and slot.
enum class Scratch { caller = 0, task = 1 };
float* scratch_floats(Scratch slot, std::size_t count);

}  // namespace canter
