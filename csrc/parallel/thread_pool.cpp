#include "parallel/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace canter {
namespace {

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// How long a worker looks out for the next region before it sleeps: longer than a program needs between two regions, short
// enough to leave the processor to others.
constexpr std::chrono::microseconds kSpin{50};
constexpr int kPausesPerLook = 32;  // between two looks at the clock

// A region is published as a ticket: | generation | number of tasks | next unclaimed task |. One addition claims a task and
// tells which region it is of and whether there is such a task, so a thread that comes late can take nothing by mistake: a
// valid claim keeps its region open, and with it the fields that describe the region.
//
// A small region lasts a few microseconds, and fetching what another processor has written takes a good part of one, each time. So
// what describes a region lies beside its ticket; the caller has task 0 without claiming it; and no counter is set back.
class ThreadPool {
public:
    // `replaced`: the pool that this one follows.
    ThreadPool(int threads, const ThreadPool* replaced) : num_threads_(threads), replaced_(replaced) {}

    int threads() const { return num_threads_; }

    void run(std::int64_t count, Task task, const void* context) {
        if (count <= 1 || !take_workers()) {
            for (std::int64_t i = 0; i < count; ++i) task(context, i);
            return;
        }
        if (count <= kMaxTasks) {
            run_region({task, nullptr, context}, static_cast<std::uint64_t>(count));
        } else {
            struct Chunks {
                std::int64_t count, each;
                Task task;
                const void* context;
            } const chunks{count, (count + kMaxTasks - 1) / kMaxTasks, task, context};
            const Task run_chunk = [](const void* given, std::int64_t index) {
                const Chunks& c = *static_cast<const Chunks*>(given);
                for (std::int64_t i = index * c.each; i < std::min(c.count, (index + 1) * c.each); ++i) c.task(c.context, i);
            };
            run_region({run_chunk, nullptr, &chunks}, static_cast<std::uint64_t>((count + chunks.each - 1) / chunks.each));
        }
        busy_.store(false, std::memory_order_release);
    }

    void run_stretches(std::int64_t stretches, StretchTask task, const void* context) {
        if (stretches <= 1 || !take_workers()) {
            for (std::int64_t s = 0; s < stretches; ++s) {
                Items items(nullptr, 0, true);
                task(context, s, items);
            }
            return;
        }
        run_region({nullptr, task, context}, static_cast<std::uint64_t>(stretches));
        busy_.store(false, std::memory_order_release);
    }

    void stop() {
        while (busy_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
        {
            const std::lock_guard<std::mutex> lock(sleep_);
            stopping_.store(true);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        busy_.store(false, std::memory_order_release);
    }

private:
    static constexpr int kTaskBits = 20, kCountShift = kTaskBits, kGenerationShift = 2 * kTaskBits;
    static constexpr std::uint64_t kTaskMask = (std::uint64_t{1} << kTaskBits) - 1;
    // Threads that find nothing left still count the next task up: it must not run into the number of tasks.
    static constexpr std::int64_t kMaxTasks = std::int64_t{1} << (kTaskBits - 1);

    // What the tasks of a region are: one of the two, and its context.
    struct Work {
        Task task;
        StretchTask stretch_task;
        const void* context;
    };

    // Whether the workers are the caller's until it sets busy_ back.
    bool take_workers() {
        if (num_threads_ == 1 || busy_.exchange(true, std::memory_order_acquire)) return false;
        if (!stopping_.load()) start();
        return true;
    }

    // Where the system gives no more threads, those that there are do the work.
    void start() {
        try {
            while (static_cast<int>(workers_.size()) < num_threads_ - 1) workers_.emplace_back([this] { work(); });
        } catch (const std::system_error&) {
        }
    }

    void run_region(const Work& work, std::uint64_t count) {
        // The region before is done, so nobody reads these: only a valid claim does.
        region_.task.store(work.task, std::memory_order_relaxed);
        region_.stretch_task.store(work.stretch_task, std::memory_order_relaxed);
        region_.context.store(work.context, std::memory_order_relaxed);
        region_.number.store(++regions_, std::memory_order_relaxed);
        region_.ticket.store(regions_ << kGenerationShift | count << kCountShift | 1, std::memory_order_release);
        std::uint64_t finished = 0, index = 0;
        const auto others = [&] { return done_.load(std::memory_order_acquire) - counted_; };
        while (index < count) {
            // Before each task: who is about to sleep may be overlooked once, and this region is done without it at the worst.
            if (sleepers_.load(std::memory_order_relaxed) > 0) {
                { const std::lock_guard<std::mutex> lock(sleep_); }
                wake_.notify_all();
            }
            run_task(work, index, count, regions_);
            ++finished;
            if (others() + finished == count) break;
            index = region_.ticket.fetch_add(1, std::memory_order_acq_rel) & kTaskMask;
        }
        for (int pauses = 0; others() + finished < count; ++pauses) {
            if (pauses < kPausesPerLook * kPausesPerLook) pause_cpu();
            else std::this_thread::yield();  // whoever has the last task may need this processor
        }
        counted_ += count - finished;
    }

    void run_task(const Work& work, std::uint64_t index, std::uint64_t count, std::uint64_t region) {
        if (work.task) return work.task(work.context, static_cast<std::int64_t>(index));
        for (std::uint64_t n = 0; n < count; ++n) {
            const std::uint64_t stretch = (index + n) % count;
            Items items(&next_items_[stretch], region, n == 0);
            work.stretch_task(work.context, static_cast<std::int64_t>(stretch), items);
        }
    }

    // What a worker does for a region: tasks until none is left. Returns the generation that had none.
    std::uint64_t drain() {
        for (std::uint64_t finished = 0;;) {
            const std::uint64_t ticket = region_.ticket.fetch_add(1, std::memory_order_acq_rel);
            const std::uint64_t index = ticket & kTaskMask, count = ticket >> kCountShift & kTaskMask;
            if (index < count) {
                if (finished == 0) __builtin_prefetch(&done_, 1, 3);
                const Work work{region_.task.load(std::memory_order_relaxed), region_.stretch_task.load(std::memory_order_relaxed),
                                region_.context.load(std::memory_order_relaxed)};
                run_task(work, index, count, region_.number.load(std::memory_order_relaxed));
                ++finished;
            }
            if (index + 1 >= count) {
                // All at once: a region can't end in between, for the tasks that are not counted yet keep it open.
                if (finished > 0) done_.fetch_add(finished, std::memory_order_release);
                return ticket >> kGenerationShift;
            }
        }
    }

    std::uint64_t generation() const { return region_.ticket.load(std::memory_order_acquire) >> kGenerationShift; }

    void work() {
        std::uint64_t seen = 0;
        while (!stopping_.load(std::memory_order_relaxed)) {
            if (generation() != seen) seen = drain();
            else if (!spin_until_changed(seen)) sleep_until_changed(seen);
        }
    }

    // Whether a new region came, or the pool's end, before the time was up.
    bool spin_until_changed(std::uint64_t seen) const {
        const auto end = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < kPausesPerLook; ++i) {
                if (generation() != seen || stopping_.load(std::memory_order_relaxed)) return true;
                pause_cpu();
            }
        } while (std::chrono::steady_clock::now() < end);
        return false;
    }

    void sleep_until_changed(std::uint64_t seen) {
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return stopping_.load() || generation() != seen; });
        sleepers_.fetch_sub(1);
    }

    const int num_threads_;
    // Held so that what stays allocated for good also stays within reach: to a leak checker, memory that nothing points to is lost.
    [[maybe_unused]] const ThreadPool* const replaced_;
    std::vector<std::thread> workers_;
    struct alignas(64) Region {
        std::atomic<std::uint64_t> ticket{0};
        std::atomic<Task> task{nullptr};
        std::atomic<StretchTask> stretch_task{nullptr};
        std::atomic<const void*> context{nullptr};
        std::atomic<std::uint64_t> number{0};
    } region_;
    alignas(64) std::atomic<std::uint64_t> done_{0};  // tasks that workers have done, of all regions
    alignas(64) std::atomic<bool> busy_{false};
    std::uint64_t regions_ = 0;  // so far; these two are of whoever has set busy_
    std::uint64_t counted_ = 0;  // of done_, in regions that have ended
    alignas(64) std::atomic<int> sleepers_{0};  // a line that every worker looks at while it waits, and no region writes to
    std::atomic<bool> stopping_{false};
    NextItem next_items_[kMostStretches];
    std::mutex sleep_;
    std::condition_variable wake_;
};

std::mutex pool_mutex;
std::atomic<ThreadPool*> pool_pointer{nullptr};

// Never destroyed at exit: workers may still be asleep then, and the process takes them along.
ThreadPool& pool() {
    ThreadPool* current = pool_pointer.load(std::memory_order_acquire);
    if (current) return *current;
    const std::lock_guard<std::mutex> lock(pool_mutex);
    if (!pool_pointer.load()) {
        pool_pointer.store(new ThreadPool(default_num_threads(), nullptr));
        // A forked child has no workers: it leaves the parent's pool behind and starts its own when it needs one.
        pthread_atfork(nullptr, nullptr, [] {
            if (ThreadPool* parent = pool_pointer.load()) pool_pointer.store(new ThreadPool(parent->threads(), parent));
            new (&pool_mutex) std::mutex;
        });
    }
    return *pool_pointer.load();
}

double read_quota_v2(const std::string& directory) {
    std::ifstream file(directory + "/cpu.max");
    std::string quota;
    double period = 0;
    if (!(file >> quota >> period) || quota == "max" || period <= 0) return HUGE_VAL;
    return std::strtod(quota.c_str(), nullptr) / period;
}

double read_quota_v1(const std::string& directory) {
    std::ifstream quota_file(directory + "/cpu.cfs_quota_us"), period_file(directory + "/cpu.cfs_period_us");
    double quota = -1, period = 0;
    if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return HUGE_VAL;
    return quota / period;
}

// Smallest quota, in processors, from this process's control group up to the root.
double cgroup_quota() {
    double quota = std::min(read_quota_v2("/sys/fs/cgroup"), read_quota_v1("/sys/fs/cgroup/cpu"));
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        const auto first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const bool v2 = controllers.empty();
        if (!v2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
        for (std::string path = line.substr(second + 1); path.size() > 1 && path[0] == '/'; path.erase(path.rfind('/'))) {
            quota = std::min(quota, v2 ? read_quota_v2("/sys/fs/cgroup" + path) : read_quota_v1("/sys/fs/cgroup/cpu" + path));
        }
    }
    return quota;
}

int count_allowed_processors() {
    const int configured = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    for (int bits = 1024; bits <= 1 << 20; bits *= 4) {  // a mask shorter than the kernel's is refused: try longer ones
        cpu_set_t* set = CPU_ALLOC(bits);
        if (!set) break;
        const std::size_t bytes = CPU_ALLOC_SIZE(bits);
        CPU_ZERO_S(bytes, set);
        const int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
        CPU_FREE(set);
        if (count > 0) return count;
    }
    return configured;
}

}  // namespace

int default_num_threads() {
    const int processors = count_allowed_processors();
    const double quota = cgroup_quota();
    return quota < processors ? std::max(1, static_cast<int>(std::ceil(quota))) : processors;
}

int num_threads() { return pool().threads(); }

void set_num_threads(int count) {
    if (count < 1) throw std::invalid_argument("set_num_threads: expected at least 1, got " + std::to_string(count) + ".");
    pool();
    const std::lock_guard<std::mutex> lock(pool_mutex);
    ThreadPool& old = *pool_pointer.load();
    if (old.threads() == count) return;
    // The old pool stays allocated: a thread that just fetched it may still run a region there, by itself.
    pool_pointer.store(new ThreadPool(count, &old));
    old.stop();
}

void run_tasks(std::int64_t count, Task task, const void* context) {
    if (count > 0) pool().run(count, task, context);
}

void run_stretches(std::int64_t stretches, StretchTask task, const void* context) { pool().run_stretches(stretches, task, context); }

float* scratch_floats(Scratch slot, std::size_t count) {
    struct Buffer {
        float* data = nullptr;
        std::size_t size = 0;
        ~Buffer() { std::free(data); }
    };
    thread_local Buffer buffers[2];
    Buffer& buffer = buffers[static_cast<int>(slot)];
    if (buffer.size < count) {
        std::free(buffer.data);
        const std::size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
        buffer.data = static_cast<float*>(std::aligned_alloc(64, bytes));
        buffer.size = buffer.data ? bytes / sizeof(float) : 0;
        if (!buffer.data) throw std::bad_alloc();
    }
#if defined(__SANITIZE_ADDRESS__)
    // A buffer is as large as the largest call so far. Each call has what it asked for and no more, and nothing of earlier ones.
    if (buffer.data) {
        __asan_unpoison_memory_region(buffer.data, buffer.size * sizeof(float));
        std::memset(buffer.data, 0xff, count * sizeof(float));
        __asan_poison_memory_region(buffer.data + count, (buffer.size - count) * sizeof(float));
    }
#endif
    return buffer.data;
}

}  // namespace canter
