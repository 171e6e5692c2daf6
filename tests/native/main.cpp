// native_tests [PART OF A NAME]...: run the tests whose names contain one of the parts, or all.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>

#include "check.h"
#include "isa/isa.h"
#include "parallel/thread_pool.h"

namespace canter::test {
namespace {

struct Entry {
    std::string name;
    void (*body)();
    bool each_isa;
};

std::vector<Entry>& entries() {
    static std::vector<Entry> all;
    return all;
}

bool is_wanted(const std::string& name, int argc, char** argv) {
    return argc < 2 || std::any_of(argv + 1, argv + argc, [&](const char* part) { return name.find(part) != std::string::npos; });
}

// Whether it passed.
bool run(const Entry& entry, const std::string& isa) {
    set_isa(isa.empty() ? supported_isas().back() : isa);
    set_num_threads(1);
    const auto start = std::chrono::steady_clock::now();
    std::string why;
    try {
        entry.body();
    } catch (const std::exception& error) {
        why = error.what();
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%-6s %6.2f s  %-12s %s%s%s\n", why.empty() ? "ok" : "FAILED", seconds, isa.c_str(), entry.name.c_str(),
                why.empty() ? "" : ": ", why.c_str());
    std::fflush(stdout);
    return why.empty();
}

}  // namespace

Test::Test(const char* name, void (*body)(), bool each_isa) { entries().push_back({name, body, each_isa}); }

std::uint64_t Random::bits() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

float to_float(bf16 x) { return __builtin_bit_cast(float, static_cast<std::uint32_t>(x.bits) << 16); }

bf16 to_bf16(float x) {
    const auto bits = __builtin_bit_cast(std::uint32_t, x);
    if (std::isnan(x)) return {static_cast<std::uint16_t>(bits >> 16 | 0x40)};
    // Halfway cases go to the even neighbour; a carry out of the significand is the next exponent.
    const std::uint32_t low = bits & 0xffff, high = bits >> 16;
    return {static_cast<std::uint16_t>(low > 0x8000 || (low == 0x8000 && (high & 1)) ? high + 1 : high)};
}

std::vector<float> extremes() {
    using L = std::numeric_limits<float>;
    return {0.0f,   -0.0f, L::denorm_min(), -L::denorm_min(), 1e-40f, L::min(),      L::max(),       -L::max(),     1e20f,
            -1e20f, 88.7f, -88.7f,          -104.0f,          1e-20f, L::infinity(), -L::infinity(), L::quiet_NaN()};
}

void check_close(const char* what, std::int64_t index, double found, double expected, double relative, double absolute) {
    if (std::isnan(expected) && std::isnan(found)) return;
    if (found == expected) return;
    // A value near the end of the type's range may round to infinity or not.
    constexpr double end = 3.39e38;
    if (std::isinf(found) && std::abs(expected) >= end && std::signbit(found) == std::signbit(expected)) return;
    if (std::isinf(expected) && std::abs(found) >= end && std::signbit(found) == std::signbit(expected)) return;
    if (std::abs(found - expected) <= relative * std::abs(expected) + absolute) return;  // false for NaN and infinities
    fail(what, ": element ", index, " is ", found, ", expected ", expected, ".");
}

void use_threads(int count) { set_num_threads(count); }

}  // namespace canter::test

int main(int argc, char** argv) {
    using namespace canter::test;
    int count = 0, failed = 0;
    for (const Entry& entry : entries()) {
        if (!is_wanted(entry.name, argc, argv)) continue;
        for (const std::string& isa : entry.each_isa ? canter::supported_isas() : std::vector<std::string>{""}) {
            ++count;
            failed += !run(entry, isa);
        }
    }
    std::printf("%d run, %d failed\n", count, failed);
    return failed || !count;
}
