// A small frame for the tests of the native core: tests register themselves, run under every instruction set, and keep
// their data in heap buffers of exact size, so that AddressSanitizer sees an access one element off.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "common.h"

namespace canter::test {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// `each_isa`: run once under every instruction set of this machine, otherwise once.
struct Test {
    Test(const char* name, void (*body)(), bool each_isa);
};

#define TEST(name)                                                   \
    static void test_##name();                                       \
    static const canter::test::Test register_##name(#name, &test_##name, true); \
    static void test_##name()

#define TEST_ONCE(name)                                              \
    static void test_##name();                                       \
    static const canter::test::Test register_##name(#name, &test_##name, false); \
    static void test_##name()

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Failure(text.str());
}

#define CHECK(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) canter::test::fail(__FILE__, ":", __LINE__, ": not so: ", #condition); \
    } while (false)

template <class Error, class F>
void check_throws(const char* what, const F& body) {
    try {
        body();
    } catch (const Error&) {
        return;
    }
    fail(what, ": nothing was thrown.");
}

// Reproducible numbers (splitmix64).
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed) {}
    std::uint64_t bits();
    std::int64_t below(std::int64_t bound) { return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(bound)); }
    float uniform(float scale = 1.0f) { return scale * static_cast<float>(static_cast<double>(bits() >> 11) / 4503599627370496.0 - 1.0); }

private:
    std::uint64_t state_;
};

float to_float(bf16 x);
inline float to_float(float x) { return x; }
bf16 to_bf16(float x);  // to nearest even

template <class T>
T from_float(float x) {
    if constexpr (std::is_same_v<T, bf16>) return to_bf16(x);
    else return x;
}

template <class T>
constexpr DType dtype_of = std::is_same_v<T, bf16> ? DType::bfloat16 : DType::float32;

// `count` elements and not a byte more, on the heap, as badly aligned as the type allows.
template <class T>
class Buffer {
public:
    explicit Buffer(std::int64_t count) : count_(count), bytes_(new unsigned char[static_cast<std::size_t>(count) * sizeof(T) + kOffset]) {
        for (std::int64_t i = 0; i < count; ++i) (*this)[i] = T{};
    }
    Buffer(const Buffer& other) : Buffer(other.count_) { std::memcpy(data(), other.data(), static_cast<std::size_t>(count_) * sizeof(T)); }
    Buffer(Buffer&& other) noexcept : count_(other.count_), bytes_(other.bytes_) { other.bytes_ = nullptr; }
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { delete[] bytes_; }

    T* data() { return reinterpret_cast<T*>(bytes_ + kOffset); }
    const T* data() const { return reinterpret_cast<const T*>(bytes_ + kOffset); }
    T& operator[](std::int64_t i) { return data()[i]; }
    const T& operator[](std::int64_t i) const { return data()[i]; }
    std::int64_t size() const { return count_; }

private:
    static constexpr std::size_t kOffset = sizeof(T) < 16 ? sizeof(T) : 0;  // off every vector's alignment
    std::int64_t count_;
    unsigned char* bytes_;
};

template <class T>
Buffer<T> random_buffer(Random& random, std::int64_t count, float scale = 1.0f) {
    Buffer<T> out(count);
    for (std::int64_t i = 0; i < count; ++i) out[i] = from_float<T>(random.uniform(scale));
    return out;
}

template <class T>
Buffer<T> filled(std::int64_t count, float value) {
    Buffer<T> out(count);
    for (std::int64_t i = 0; i < count; ++i) out[i] = from_float<T>(value);
    return out;
}

// Zeros, denormals, the largest numbers, infinities and NaN, in random order among ordinary numbers.
std::vector<float> extremes();

template <class T>
Buffer<T> extreme_buffer(Random& random, std::int64_t count) {
    const std::vector<float> values = extremes();
    Buffer<T> out(count);
    for (std::int64_t i = 0; i < count; ++i) {
        const bool ordinary = random.below(3) == 0;
        out[i] = from_float<T>(ordinary ? random.uniform(4.0f)
                                        : values[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(values.size())))]);
    }
    return out;
}

// Equal NaN-ness, equal infinities, and otherwise |found - expected| <= relative * |expected| + absolute.
void check_close(const char* what, std::int64_t index, double found, double expected, double relative, double absolute);

// What a result of type T may differ from the exact value: `ulps` units of float32, and the rounding to T.
template <class T>
double relative_of(double ulps) {
    return ulps * 0x1p-23 + (std::is_same_v<T, bf16> ? 0x1p-8 : 0.0);
}

template <class T>
void check_same_bits(const char* what, const T* found, const T* expected, std::int64_t count) {
    if (count > 0 && std::memcmp(found, expected, static_cast<std::size_t>(count) * sizeof(T)) != 0) {
        for (std::int64_t i = 0; i < count; ++i) {
            if (std::memcmp(found + i, expected + i, sizeof(T)) != 0) fail(what, ": bits differ first at element ", i, ".");
        }
    }
}

// The numbers of elements at which vectors begin, end and are cut short.
inline constexpr std::int64_t kWidths[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 130};

// Run the body for every pair of storage types, as body(T{}, W{}).
template <class F>
void for_types(const F& body) {
    body(float{}, float{});
    body(float{}, bf16{});
    body(bf16{}, float{});
    body(bf16{}, bf16{});
}

// Run with one thread, and with four.
template <class F>
void for_threads(const F& body);

void use_threads(int count);

template <class F>
void for_threads(const F& body) {
    for (const int threads : {1, 4}) {
        use_threads(threads);
        body();
    }
    use_threads(1);
}

}  // namespace canter::test
