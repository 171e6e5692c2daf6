#include "bench/limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "isa/isa.h"

namespace canter {
namespace {

#if defined(CANTER_X86)
constexpr const LimitKernels* kTables[kNumIsas] = {&kScalarLimits, &kAvx2Limits, &kAvx512Limits, &kAvx512VnniLimits, &kAvx512Bf16Limits,
                                                   &kAmxLimits};
#elif defined(CANTER_ARM)
constexpr const LimitKernels* kTables[kNumIsas] = {&kScalarLimits, nullptr, nullptr, nullptr, nullptr, nullptr, &kNeonLimits,
                                                   &kNeonDotLimits};
#else
constexpr const LimitKernels* kTables[kNumIsas] = {&kScalarLimits};
#endif

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// All threads leave wait() together. It yields after a while: the machine may have fewer processors than threads.
class Barrier {
public:
    explicit Barrier(int threads) : threads_(threads) {}

    void wait() {
        const int turn = turn_.load();
        if (arrived_.fetch_add(1) + 1 == threads_) {
            arrived_.store(0);
            turn_.store(turn + 1);
            return;
        }
        for (int spins = 0; turn_.load() == turn; ++spins) {
            if (spins > 1000) std::this_thread::yield();
        }
    }

private:
    const int threads_;
    std::atomic<int> arrived_{0}, turn_{0};
};

// Seconds that body(thread) takes on all threads at once, from a common start to the last one's end: the best of
// `passes`, after one that is not counted. These are threads of their own: a task of the pool may not wait for another.
template <class Body>
double best_seconds(int threads, int passes, const Body& body) {
    Barrier barrier(threads);
    double best = std::numeric_limits<double>::infinity();
    const auto run = [&](int thread) {
        for (int pass = 0; pass <= passes; ++pass) {
            barrier.wait();
            const double start = now();
            body(thread);
            barrier.wait();
            if (thread == 0 && pass > 0) best = std::min(best, now() - start);
        }
    };
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
    run(0);
    for (auto& other : others) other.join();
    return best;
}

void check_threads(int threads) {
    if (threads < 1) throw std::invalid_argument("Threads to measure with must be at least 1, got " + std::to_string(threads) + ".");
}

struct Free {
    void operator()(std::uint8_t* data) const { std::free(data); }
};

// Memory on huge pages, where the system has them: as weights are held, and so that the limit is the memory's.
std::unique_ptr<std::uint8_t[], Free> allocate(std::int64_t num_bytes) {
    constexpr std::size_t alignment = 2 << 20;
    const std::size_t size = (static_cast<std::size_t>(num_bytes) + alignment - 1) / alignment * alignment;
    auto* data = static_cast<std::uint8_t*>(std::aligned_alloc(alignment, size));
    if (!data) throw std::bad_alloc();
#if defined(__linux__)
    madvise(data, size, MADV_HUGEPAGE);
#endif
    return std::unique_ptr<std::uint8_t[], Free>(data);
}

std::atomic<std::uint64_t> sink{0};  // keeps what was read from being optimised away

}  // namespace

double read_bandwidth(std::int64_t num_bytes, int threads, int passes) {
    check_threads(threads);
    if (passes < 1 || num_bytes < 1) throw std::invalid_argument("Bytes and passes to measure with must be at least 1.");
    const std::int64_t granules = std::max<std::int64_t>(1, num_bytes / (threads * kReadGranule));
    const std::int64_t share = granules * kReadGranule;
    const auto data = allocate(share * threads);
    const LimitKernels& kernels = best_table(kTables);
    std::uint8_t* base = data.get();
    // Each share is filled by one thread, so that its pages lie near some thread, and are pages of their own at all.
    best_seconds(threads, 0, [&](int thread) { std::fill_n(base + thread * share, share, static_cast<std::uint8_t>(thread + 1)); });
    double seconds = std::numeric_limits<double>::infinity();
    for (const bool ask_ahead : {true, false}) {  // which is faster depends on the machine
        seconds = std::min(seconds, best_seconds(threads, passes, [&](int thread) {
            sink.fetch_add(kernels.read(base + thread * share, share, ask_ahead), std::memory_order_relaxed);
        }));
    }
    return static_cast<double>(share) * threads / seconds;
}

double peak_operations(const std::string& kind, int threads) {
    check_threads(threads);
    const LimitKernels& kernels = best_table(kTables);
    void (*loop)(std::int64_t) = nullptr;
    std::int64_t operations = 0;
    if (kind == "float32") {
        loop = kernels.fma_f32;
        operations = kernels.f32_operations;
    } else if (kind == "bfloat16") {
        loop = kernels.dot_bf16;
        operations = kernels.bf16_operations;
    } else if (kind == "int8") {
        loop = kernels.dot_int8;
        operations = kernels.int8_operations;
    } else {
        throw std::invalid_argument("Kind of product must be float32, bfloat16 or int8, got '" + kind + "'.");
    }
    if (!loop) return 0.0;
    // As many rounds as take about ten milliseconds, so that the processor has found its speed.
    std::int64_t rounds = 1024;
    for (double seconds = 0; seconds < 2e-3;) {
        rounds *= 2;
        const double start = now();
        loop(rounds);
        seconds = now() - start;
    }
    rounds *= 4;
    const double seconds = best_seconds(threads, 5, [&](int) { loop(rounds); });
    return static_cast<double>(operations) * static_cast<double>(rounds) * threads / seconds;
}

}  // namespace canter
