// What each type of cache is, whatever the instruction set: the base of its codecs.
//
// `lanes`: elements of d of a key that lie together; `step`: those that a step of the loops over d takes; `factor`: by which a
// codec's floats are too small (a power of two, made good once at the end); `convert_rows`: from how many rows on keys and values
// are made floats once instead of by every few rows anew; `split`: whether a codec loads two registers faster with even and odd
// elements apart.
#pragma once

#include <cstdint>

#include "attention/attention.h"

namespace canter {

template <class E, int Lanes, int Step>
struct CacheElements {
    using Element = E;
    static constexpr int lanes = Lanes;
    static constexpr int step = Step;
    static constexpr int convert_rows = sizeof(E) == 1 ? 5 : 24;
    static constexpr float factor = 1.0f;
    static constexpr bool split = false;
};

using CacheF32 = CacheElements<float, 1, 1>;
using CacheBF16 = CacheElements<bf16, 2, 2>;
using CacheF16 = CacheElements<f16, 1, 2>;
using CacheI8 = CacheElements<std::int8_t, 4, 4>;
struct CacheFP8 : CacheElements<std::uint8_t, 4, 4> {
    static constexpr float factor = 256.0f;
};

}  // namespace canter
