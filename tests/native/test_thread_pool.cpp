// The thread pool under many short regions, nested ones, several callers, resizing and forks.

#include <sys/wait.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <atomic>
#include <thread>

#include "check.h"
#include "parallel/rows.h"
#include "parallel/thread_pool.h"

namespace canter::test {
namespace {

// Run a region of `count` tasks, and check that each ran once.
void check_region(std::int64_t count) {
    std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
    parallel_for(count, [&](std::int64_t i) { runs[static_cast<std::size_t>(i)].fetch_add(1, std::memory_order_relaxed); });
    for (const auto& n : runs) CHECK(n.load(std::memory_order_relaxed) == 1);
}

void check_many_regions(int regions) {
    for (int i = 0; i < regions; ++i) check_region(i % 13);
}

TEST_ONCE(regions_in_a_row) {
    for (const int threads : {1, 2, 3, 8}) {
        set_num_threads(threads);
        CHECK(num_threads() == threads);
        check_many_regions(3000);
        check_region(10000);
    }
}

TEST_ONCE(regions_after_sleep) {
    set_num_threads(3);
    for (int i = 0; i < 20; ++i) {
        check_region(7);
        ::usleep(500);  // longer than workers spin: they sleep, and the next region wakes them
    }
}

#if defined(__SANITIZE_ADDRESS__)
// Of a buffer that a larger call left behind, a sanitized build lets a smaller one touch its own part alone.
TEST_ONCE(scratch_is_as_large_as_asked) {
    for (const Scratch slot : {Scratch::caller, Scratch::task}) {
        scratch_floats(slot, 4096);
        for (const std::size_t count : {std::size_t{1}, std::size_t{3}, std::size_t{64}, std::size_t{4095}}) {
            float* own = scratch_floats(slot, count);
            CHECK(!__asan_region_is_poisoned(own, count * sizeof(float)));
            CHECK(__asan_address_is_poisoned(own + count));
            CHECK(std::isnan(own[0]));
        }
        CHECK(!__asan_region_is_poisoned(scratch_floats(slot, 4096), 4096 * sizeof(float)));
    }
}
#endif

// The results of plain stores in tasks are visible to the caller afterwards.
TEST_ONCE(results_are_visible) {
    set_num_threads(4);
    std::vector<std::int64_t> values(64);
    for (std::int64_t round = 0; round < 2000; ++round) {
        parallel_for(64, [&](std::int64_t i) { values[static_cast<std::size_t>(i)] = round * i; });
        for (std::int64_t i = 0; i < 64; ++i) CHECK(values[static_cast<std::size_t>(i)] == round * i);
    }
}

// Stretches of 0, 3, 6, ... items, and one more than the rest: each item is given out once, whoever takes it.
void check_stretches(std::int64_t stretches, int late_us) {
    const auto items_of = [&](std::int64_t s) { return s == stretches - 1 ? 3 * s + 50 : 3 * s; };
    std::vector<std::vector<std::atomic<int>>> runs;
    for (std::int64_t s = 0; s < stretches; ++s) runs.emplace_back(static_cast<std::size_t>(items_of(s)));
    std::atomic<int> began{0};
    parallel_stretches(stretches, [&](std::int64_t s, Items& items) {
        // Whoever comes to a stretch may be slow: others take what is left of it meanwhile, but not its first item.
        if (late_us > 0 && began.fetch_add(1) % 2 == 0) ::usleep(static_cast<useconds_t>(late_us));
        for (std::int64_t i; (i = items.take()) < items_of(s);) {
            runs[static_cast<std::size_t>(s)][static_cast<std::size_t>(i)].fetch_add(1, std::memory_order_relaxed);
        }
    });
    for (const auto& stretch : runs) {
        for (const auto& n : stretch) CHECK(n.load(std::memory_order_relaxed) == 1);
    }
}

TEST_ONCE(stretches_are_covered_once) {
    for (const int threads : {1, 2, 3, 8}) {
        set_num_threads(threads);
        for (int round = 0; round < 500; ++round) {
            for (const std::int64_t stretches : {0, 1, 2, 3, 8}) check_stretches(stretches, 0);
            check_region(round % 5);
        }
        check_stretches(kMostStretches, 0);
        for (int round = 0; round < 10; ++round) check_stretches(3, 300);
    }
}

TEST_ONCE(stretches_of_several_callers) {
    set_num_threads(3);
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) {
        callers.emplace_back([] {
            for (int round = 0; round < 500; ++round) check_stretches(3, 0);
        });
    }
    for (auto& caller : callers) caller.join();
    parallel_for(4, [&](std::int64_t) { check_stretches(2, 0); });
}

TEST_ONCE(nested_regions) {
    set_num_threads(4);
    for (int round = 0; round < 200; ++round) {
        std::atomic<std::int64_t> sum{0};
        parallel_for(8, [&](std::int64_t i) { parallel_for(9, [&](std::int64_t j) { sum += 9 * i + j; }); });
        CHECK(sum == 72 * 71 / 2);
    }
}

TEST_ONCE(several_callers) {
    set_num_threads(3);
    std::atomic<int> failures{0};
    std::vector<std::thread> callers;
    for (int n = 0; n < 3; ++n) {
        callers.emplace_back([&] {
            try {
                check_many_regions(2000);
            } catch (const Failure&) {
                ++failures;
            }
        });
    }
    for (auto& caller : callers) caller.join();
    CHECK(failures == 0);
}

TEST_ONCE(resizing_while_regions_run) {
    std::atomic<bool> done{false};
    std::atomic<int> failures{0};
    std::thread caller([&] {
        try {
            while (!done) check_many_regions(50);
        } catch (const Failure&) {
            ++failures;
        }
    });
    for (int i = 0; i < 60; ++i) {
        set_num_threads(1 + i % 5);
        check_region(11);
    }
    done = true;
    caller.join();
    CHECK(failures == 0);
}

TEST_ONCE(refused_sizes) {
    set_num_threads(2);
    for (const int count : {0, -3}) check_throws<std::invalid_argument>("set_num_threads", [&] { set_num_threads(count); });
    CHECK(num_threads() == 2);
    check_region(5);
    CHECK(default_num_threads() >= 1);
}

TEST_ONCE(a_forked_child_has_its_own_pool) {
    set_num_threads(3);
    check_region(9);
    const pid_t child = fork();
    if (child == 0) {
        check_many_regions(20);
        ::_exit(num_threads() == 3 ? 7 : 8);
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
    check_region(9);
}

TEST_ONCE(rows_are_covered_once) {
    for_threads([] {
        for (const std::int64_t rows : {0, 1, 2, 5, 17, 1000}) {
            for (const std::int64_t cost : {0, 1, 100, 1 << 14, 1 << 20}) {
                std::vector<std::atomic<int>> runs(static_cast<std::size_t>(rows));
                for_rows(rows, cost, [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t i = begin; i < end; ++i) ++runs[static_cast<std::size_t>(i)];
                });
                for (const auto& n : runs) CHECK(n == 1);
            }
        }
    });
}

TEST_ONCE(scratch_is_each_threads_own) {
    set_num_threads(4);
    std::atomic<int> mixed{0};
    for (std::size_t size = 1; size < 5000; size = size * 3 + 1) {
        parallel_for(16, [&](std::int64_t i) {
            float* mine = scratch_floats(Scratch::task, size);
            if (reinterpret_cast<std::uintptr_t>(mine) % 64 != 0) ++mixed;
            for (std::size_t j = 0; j < size; ++j) mine[j] = static_cast<float>(i);
            for (std::size_t j = 0; j < size; ++j) mixed += mine[j] != static_cast<float>(i);
        });
    }
    CHECK(mixed == 0);
}

}  // namespace
}  // namespace canter::test
