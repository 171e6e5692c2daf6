// The one thread pool. Workers start at the first parallel region, spin briefly between regions and then sleep.
#pragma once

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

// This thread's scratch memory, 64-byte aligned, kept between calls. One live buffer per thread and slot.
enum class Scratch { caller = 0, task = 1 };
float* scratch_floats(Scratch slot, std::size_t count);

}  // namespace canter
