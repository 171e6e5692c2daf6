// Included once per instruction set.
//
// No row is sorted. A first pass takes the maximum of each block of 64 logits; the W-th largest of these maxima is a
// bound that at least W logits reach and few more, so what is above it can be listed, and the list settles truncation.
// Where it can't (flat rows, large k), buckets find the threshold: by distance from the peak, or over the bits of the values,
// three passes for 32 bits.
//
// A draw is the largest of logit plus Gumbel noise. The noise itself takes two logarithms, so for most tokens only a
// bound of it is made, from the bits of the uniform number: minus log2 of a float is at most its bits read as a fixed
// point number. Only a token that could win by that bound is scored exactly, in double arithmetic and then rounded, which
// gives the same score under every instruction set.

#include "sampling/sampling.h"

namespace canter::CANTER_ISA {

inline constexpr float kInf = __builtin_inff();
inline constexpr float kLargestNoise = 22.2f;
inline constexpr float kUniformScale = 4.656612595521636e-10f;  // (1 - 2^-24) 2^-31
inline constexpr std::int64_t kNoTie = INT64_MAX;

// The bits of a float, changed so that they order as the float does; both zeros are equal.
inline std::uint32_t ordered(float value) {
    value += 0.0f;
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

inline float unordered(std::uint32_t key) {
    const std::uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// A candidate: greater for a greater value, and for the lower id of two equal ones.
inline std::uint64_t pack(float value, std::int64_t id) {
    return (static_cast<std::uint64_t>(ordered(value)) << 32) | (0xffffffffu - static_cast<std::uint32_t>(id));
}
inline float value_of(std::uint64_t packed) { return unordered(static_cast<std::uint32_t>(packed >> 32)); }
inline std::int64_t id_of(std::uint64_t packed) { return 0xffffffffu - static_cast<std::uint32_t>(packed); }

// Heapsort, greatest first: as fast for any order, and in place.
inline void sift_down(std::uint64_t* heap, std::int64_t at, std::int64_t count) {
    const std::uint64_t moved = heap[at];
    for (std::int64_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && heap[child + 1] < heap[child]) ++child;
        if (heap[child] >= moved) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

inline void sort_descending(std::uint64_t* list, std::int64_t count) {
    for (std::int64_t i = count / 2 - 1; i >= 0; --i) sift_down(list, i, count);
    for (std::int64_t end = count - 1; end > 0; --end) {
        const std::uint64_t least = list[0];
        list[0] = list[end];
        list[end] = least;
        sift_down(list, 0, end);
    }
}

// The k-th largest (k from 1) of `count` values, which are reordered. Hoare's selection.
inline float kth_largest(float* v, std::int64_t count, std::int64_t k) {
    std::int64_t low = 0, high = count - 1;
    const std::int64_t target = k - 1;
    while (low < high) {
        const float a = v[low], b = v[(low + high) / 2], c = v[high];
        const float pivot = a > b ? (b > c ? b : (a > c ? c : a)) : (a > c ? a : (b > c ? c : b));
        std::int64_t i = low, j = high;
        while (i <= j) {
            while (v[i] > pivot) ++i;
            while (v[j] < pivot) --j;
            if (i <= j) {
                const float swapped = v[i];
                v[i++] = v[j];
                v[j--] = swapped;
            }
        }
        if (target <= j) high = j;
        else if (target >= i) low = i;
        else break;
    }
    return v[target];
}

inline float exp_one(float x) {
    float lanes[Vec::width];
    Vec::store(lanes, exp(Vec::set1(x)));
    return lanes[0];
}

// ---- one row ----

struct Survey {
    const float* row;
    float* maxima;  // of each whole block
    std::int64_t blocks, vocab;
    float peak;
    bool has_nan;

    std::int64_t tail() const { return blocks * kSamplingBlock; }
};

inline Survey survey(const float* row, std::int64_t vocab, float* maxima) {
    constexpr int each = kSamplingBlock / Vec::width;
    Survey s{row, maxima, vocab / kSamplingBlock, vocab, -kInf, false};
    for (std::int64_t b = 0; b < s.blocks; ++b) {
        const float* p = row + b * kSamplingBlock;
        Reg best = Vec::set1(-kInf);
        bool nan = false;
#pragma GCC unroll 16
        for (int i = 0; i < each; i += 2) {
            const Reg x = Vec::load(p + i * Vec::width), y = Vec::load(p + (i + 1) * Vec::width);
            nan |= Lanes::any_nan(x, y);
            best = Vec::max(best, Vec::max(x, y));
        }
        s.has_nan |= nan;
        maxima[b] = Vec::highest(best);
        if (maxima[b] > s.peak) s.peak = maxima[b];
    }
    for (std::int64_t i = s.tail(); i < vocab; ++i) {
        s.has_nan |= row[i] != row[i];
        if (row[i] > s.peak) s.peak = row[i];
    }
    return s;
}

inline std::int64_t first_nan(const Survey& s) {
    for (std::int64_t i = 0; i < s.vocab; ++i) {
        if (s.row[i] != s.row[i]) return i;
    }
    return 0;
}

inline std::int64_t first_equal(const float* row, std::int64_t count, float value) {
    const Reg wanted = Vec::set1(value);
    std::int64_t i = 0;
    for (; i + Vec::width <= count; i += Vec::width) {
        const unsigned found = Lanes::equal(Vec::load(row + i), wanted);
        if (found) return i + __builtin_ctz(found);
    }
    for (; i < count; ++i) {
        if (row[i] == value) return i;
    }
    return 0;
}

inline std::int64_t argmax_of(const Survey& s) {
    if (s.has_nan) return first_nan(s);
    for (std::int64_t b = 0; b < s.blocks; ++b) {
        if (s.maxima[b] == s.peak) return b * kSamplingBlock + first_equal(s.row + b * kSamplingBlock, kSamplingBlock, s.peak);
    }
    return s.tail() + first_equal(s.row + s.tail(), s.vocab - s.tail(), s.peak);
}

// ---- truncation ----

// Parts of the scratch memory.
struct Work {
    float* maxima;
    float* copy;
    std::uint64_t* list;
    double* buckets;
    float* values;
    float* weights;

    Work(float* scratch, std::int64_t vocab) {
        const std::int64_t blocks = (vocab / kSamplingBlock + 15) / 16 * 16, row = (vocab + 15) / 16 * 16;
        list = reinterpret_cast<std::uint64_t*>(scratch);
        buckets = reinterpret_cast<double*>(scratch + 2 * kMaxListed);
        maxima = scratch + 2 * kMaxListed + 2 * kRadixBuckets;
        copy = maxima + blocks;
        values = copy + blocks;
        weights = values + row;
    }
};

// Values of at least `least`, of those equal to it only ids up to `last_id`. `listed` of them stand in Work::list, best
// first; -1: they are not listed.
struct Kept {
    float least;
    std::int64_t last_id, listed;
};

// List the values x / divisor of at least `least`, -inf only if `with_minus_inf`. Returns their number, or -1 for too many.
inline std::int64_t list_from(const Survey& s, float divisor, float least, bool with_minus_inf, std::uint64_t* list) {
    std::int64_t count = 0;
    const Reg by = Vec::set1(divisor), bound = Vec::set1(least);
    for (std::int64_t b = 0; b < s.blocks; ++b) {
        if (!(s.maxima[b] / divisor >= least)) continue;
        if (count + kSamplingBlock > kMaxListed) return -1;
        for (std::int64_t i = b * kSamplingBlock; i < (b + 1) * kSamplingBlock; i += Vec::width) {
            const Reg y = Vec::div(Vec::load(s.row + i), by);
            unsigned found = Lanes::at_least(y, bound);
            if (!found) continue;
            float lanes[Vec::width];
            Vec::store(lanes, y);
            for (; found; found &= found - 1) {
                const int lane = __builtin_ctz(found);
                if (lanes[lane] > -kInf || with_minus_inf) list[count++] = pack(lanes[lane], i + lane);
            }
        }
    }
    for (std::int64_t i = s.tail(); i < s.vocab; ++i) {
        const float y = s.row[i] / divisor;
        if (!(y >= least) || (y == -kInf && !with_minus_inf)) continue;
        if (count == kMaxListed) return -1;
        list[count++] = pack(y, i);
    }
    return count;
}

// A bound that at least `width` values reach; false when there are too few blocks to tell.
inline bool bound_of(const Survey& s, std::int64_t width, float* copy, float* bound) {
    if (width > s.blocks) {
        if (s.vocab > kMaxListed) return false;
        *bound = -kInf;  // small enough to list everything
        return true;
    }
    __builtin_memcpy(copy, s.maxima, static_cast<std::size_t>(s.blocks) * sizeof(float));
    *bound = kth_largest(copy, s.blocks, width);
    return true;
}

// Whether a block weighs anything: what is below 2^-44 of the peak doesn't.
inline bool block_weighs(const Survey& s, std::int64_t b, float divisor, float peak, float floor) {
    const float best = s.maxima[b] / divisor;
    return !(best - peak < -31.0f || best < floor);
}

// exp(y - peak) where y is at least `floor`, summed over the row in one fixed order. `values` and `weights`, where they are
// given, take y and its weight, of whole blocks that weigh something.
inline double mass_of(const Survey& s, float divisor, float peak, float floor, float* values = nullptr, float* weights = nullptr) {
    double total = 0.0;
    const Reg by = Vec::set1(divisor), top = Vec::set1(peak), bound = Vec::set1(floor);
    for (std::int64_t b = 0; b < s.blocks; ++b) {
        if (!block_weighs(s, b, divisor, peak, floor)) continue;
        Reg sum = Vec::zero();
        for (std::int64_t i = b * kSamplingBlock; i < (b + 1) * kSamplingBlock; i += Vec::width) {
            const Reg y = Vec::div(Vec::load(s.row + i), by);
            const Reg weight = Vec::select_greater(bound, y, Vec::zero(), exp(Vec::sub(y, top)));
            sum = Vec::add(sum, weight);
            if (!values) continue;
            Vec::store(values + i, y);
            Vec::store(weights + i, weight);
        }
        total += Vec::sum(sum);
    }
    for (std::int64_t i = s.tail(); i < s.vocab; ++i) {
        const float y = s.row[i] / divisor;
        if (y >= floor) total += exp_one(y - peak);
    }
    return total;
}

// In buckets over the ordered bits, descending: the value at which the running sum of weights (null: of ones) reaches
// `target`, and the sum before it. Values below `floor` and -inf don't count. The least value counted when it is never reached.
inline float radix_reach(const float* values, const float* weights, std::int64_t vocab, float floor, double target, double* buckets,
                         double* before) {
    constexpr int shifts[3] = {21, 10, 0}, widths[3] = {11, 11, 10};
    std::uint32_t prefix = 0;
    double sum = 0.0;
    for (int level = 0; level < 3; ++level) {
        const std::int64_t count = std::int64_t{1} << widths[level];
        std::uint64_t used[kRadixBuckets / 64] = {};
        __builtin_memset(buckets, 0, static_cast<std::size_t>(count) * sizeof(double));
        const int above = shifts[level] + widths[level];
        for (std::int64_t i = 0; i < vocab; ++i) {
            if (!(values[i] >= floor) || values[i] == -kInf) continue;
            const std::uint32_t key = ordered(values[i]);
            if (level && key >> above != prefix) continue;
            const std::uint32_t at = (key >> shifts[level]) & static_cast<std::uint32_t>(count - 1);
            used[at / 64] |= std::uint64_t{1} << (at % 64);
            buckets[at] += weights ? weights[i] : 1.0;
        }
        std::int64_t chosen = -1;
        double chosen_before = sum;
        for (std::int64_t b = count - 1; b >= 0; --b) {
            if (!(used[b / 64] >> (b % 64) & 1)) continue;
            chosen = b;
            chosen_before = sum;
            if (sum + buckets[b] >= target) break;
            sum += buckets[b];
        }
        if (chosen < 0) return -kInf;
        sum = chosen_before;
        prefix = (prefix << widths[level]) | static_cast<std::uint32_t>(chosen);
    }
    *before = sum;
    return unordered(prefix);
}

inline Kept keep_by_radix(const Survey& s, float divisor, float peak, float floor, std::int64_t top_k, double top_p, const Work& work) {
    for (std::int64_t i = 0; i < s.vocab; i += Vec::width) {
        const Reg y = Vec::div(load_some(s.row + i, s.vocab - i), Vec::set1(divisor));
        Vec::store(work.values + i, y);
        Vec::store(work.weights + i, exp(Vec::sub(y, Vec::set1(peak))));
    }
    double before = 0.0;
    if (top_k < s.vocab) {
        const float kth = radix_reach(work.values, nullptr, s.vocab, floor, static_cast<double>(top_k), work.buckets, &before);
        if (kth > floor) floor = kth;
    }
    if (top_p >= 1.0) return {floor, kNoTie, -1};
    double total = 0.0;
    for (std::int64_t i = 0; i < s.vocab; ++i) {
        if (work.values[i] >= floor) total += work.weights[i];
    }
    before = 0.0;
    const double target = top_p * total;
    const float least = radix_reach(work.values, work.weights, s.vocab, floor, target, work.buckets, &before);
    Kept kept{least, kNoTie, -1};
    for (std::int64_t i = 0; i < s.vocab && before < target; ++i) {
        if (work.values[i] != least) continue;
        kept.last_id = i;
        before += work.weights[i];
    }
    return kept;
}

// Top-p of a row too flat for a short list, without top-k: weights in buckets of 1/64 by distance from the peak, then the
// values of the one bucket in which the share is reached, sorted. Work::values and Work::weights are as `mass_of` left them.
// False when these are too many, or too far down.
inline bool keep_by_distance(const Survey& s, float divisor, float peak, float floor, double target, const Work& work, Kept* kept) {
    constexpr float kPerUnit = 64.0f, kLast = kRadixBuckets - 1;
    __builtin_memset(work.buckets, 0, kRadixBuckets * sizeof(double));
    const Reg top = Vec::set1(peak), scale = Vec::set1(kPerUnit), last = Vec::set1(kLast), bound = Vec::set1(floor);
    for (std::int64_t b = 0; b < s.blocks; ++b) {
        if (!block_weighs(s, b, divisor, peak, floor)) continue;
        std::int32_t places[kSamplingBlock];
        for (int i = 0; i < kSamplingBlock; i += Vec::width) {
            const Reg y = Vec::load(work.values + b * kSamplingBlock + i);
            Lanes::store(places + i, Lanes::truncate(Vec::min(Vec::mul(Vec::sub(top, y), scale), last)));
        }
        const float* weights = work.weights + b * kSamplingBlock;
        for (int i = 0; i < kSamplingBlock; ++i) work.buckets[places[i]] += weights[i];
    }
    for (std::int64_t i = s.tail(); i < s.vocab; ++i) {
        const float y = s.row[i] / divisor, place = (peak - y) * kPerUnit;
        if (y >= floor) work.buckets[static_cast<int>(place < kLast ? place : kLast)] += exp_one(y - peak);
    }
    double before = 0.0;
    int bucket = 0;
    while (bucket < kLast && before + work.buckets[bucket] < target) before += work.buckets[bucket++];
    if (bucket >= static_cast<int>(kLast)) return false;
    std::int64_t count = 0;
    const Reg low = Vec::set1(static_cast<float>(bucket)), high = Vec::set1(static_cast<float>(bucket + 1));
    for (std::int64_t b = 0; b < s.blocks; ++b) {
        if (!block_weighs(s, b, divisor, peak, floor) || (peak - s.maxima[b] / divisor) * kPerUnit >= static_cast<float>(bucket + 1)) {
            continue;
        }
        if (count + kSamplingBlock > kMaxListed) return false;
        for (std::int64_t i = b * kSamplingBlock; i < (b + 1) * kSamplingBlock; i += Vec::width) {
            const Reg y = Vec::load(work.values + i);
            const Reg place = Vec::mul(Vec::sub(top, y), scale);
            unsigned found = Lanes::at_least(place, low) & Lanes::greater(high, place) & Lanes::at_least(y, bound);
            if (!found) continue;
            float lanes[Vec::width];
            Vec::store(lanes, y);
            for (; found; found &= found - 1) work.list[count++] = pack(lanes[__builtin_ctz(found)], i + __builtin_ctz(found));
        }
    }
    for (std::int64_t i = s.tail(); i < s.vocab; ++i) {
        const float y = s.row[i] / divisor, place = (peak - y) * kPerUnit;
        if (!(y >= floor && place >= static_cast<float>(bucket) && place < static_cast<float>(bucket + 1))) continue;
        if (count == kMaxListed) return false;
        work.list[count++] = pack(y, i);
    }
    if (!count) return false;
    sort_descending(work.list, count);
    std::int64_t end = 0;
    while (end < count && before < target) before += exp_one(value_of(work.list[end++]) - peak);
    if (!end) return false;
    *kept = {value_of(work.list[end - 1]), id_of(work.list[end - 1]), -1};
    return true;
}

// Truncate a list, which is sorted here: `total` is the weight of the row where top-k is off. False when it would take
// values that are not listed, which is not so when the list `is_all` that top-k and min-p leave.
inline bool keep_of_list(std::uint64_t* list, std::int64_t count, float peak, std::int64_t top_k, double top_p, double total, bool is_all,
                         Kept* kept) {
    sort_descending(list, count);
    if (count > top_k) {
        const std::uint64_t kth = list[top_k - 1] >> 32;
        std::int64_t end = top_k;
        while (end < count && list[end] >> 32 == kth) ++end;
        count = end;
    }
    if (top_p < 1.0) {
        float weights[kMaxListed];
        for (std::int64_t i = 0; i < count; i += Vec::width) {
            float lanes[Vec::width] = {};
            for (std::int64_t j = 0; j < Vec::width && i + j < count; ++j) lanes[j] = value_of(list[i + j]) - peak;
            Vec::store(weights + i, exp(Vec::load(lanes)));
        }
        if (total == 0.0) {
            for (std::int64_t i = 0; i < count; ++i) total += weights[i];
        }
        double before = 0.0;
        std::int64_t end = 0;
        while (end < count && before < top_p * total) before += weights[end++];
        if (!is_all && before < top_p * total) return false;
        count = end;
    }
    *kept = {value_of(list[count - 1]), id_of(list[count - 1]), count};
    return true;
}

// What truncation leaves of a row whose logits are finite or -inf, at least one of them finite.
inline Kept keep_of(const Survey& s, float divisor, std::int64_t top_k, double top_p, float log_min_p, const Work& work) {
    const float peak = s.peak / divisor;
    const float floor = log_min_p > -kInf ? peak + log_min_p : -kInf;
    const bool bounded = top_k < s.vocab;
    if (!bounded && top_p >= 1.0) return {floor, kNoTie, -1};
    const double all = top_p < 1.0 && !bounded ? mass_of(s, divisor, peak, floor, work.values, work.weights) : 0.0;
    float bound;
    if (bound_of(s, bounded ? top_k : 64, work.copy, &bound)) {
        bound /= divisor;
        const float least = bound > floor ? bound : floor;
        const std::int64_t listed = list_from(s, divisor, least, false, work.list);
        Kept kept;
        if (listed > 0 && keep_of_list(work.list, listed, peak, bounded ? top_k : listed, top_p, all, bounded || least == floor, &kept)) {
            return kept;
        }
    }
    Kept kept;
    if (!bounded && keep_by_distance(s, divisor, peak, floor, top_p * all, work, &kept)) return kept;
    return keep_by_radix(s, divisor, peak, floor, top_k, top_p, work);
}

// ---- drawing ----

struct Stream {
    std::uint32_t low, high;
};

// As `position_keys` of the reference: the splitmix64 finaliser.
inline Stream stream_of(std::int64_t seed_key, std::int64_t position, std::uint64_t offset) {
    std::uint64_t x = static_cast<std::uint64_t>(position) * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(seed_key) + offset;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    return {static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(x >> 32)};
}

inline std::int32_t random_bits(Stream key, std::int32_t salt) {
    std::uint32_t x = ((static_cast<std::uint32_t>(salt) ^ key.low) + key.high) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    x = (x ^ (x >> 16)) * 0x9E3779B1u;
    return static_cast<std::int32_t>(x ^ static_cast<std::uint32_t>(static_cast<std::int32_t>(x) >> 15));
}

inline Lanes::ireg random_bits(Lanes::ireg low, Lanes::ireg high, Lanes::ireg salts) {
    Lanes::ireg x = Lanes::multiply(Lanes::add(Lanes::exclusive_or(salts, low), high), Lanes::set1(0x7FEB352D));
    x = Lanes::multiply(Lanes::exclusive_or(x, Lanes::shift_right<15>(x)), Lanes::set1(static_cast<std::int32_t>(0x846CA68Bu)));
    x = Lanes::multiply(Lanes::exclusive_or(x, Lanes::shift_right<16>(x)), Lanes::set1(static_cast<std::int32_t>(0x9E3779B1u)));
    return Lanes::exclusive_or(x, Lanes::shift_right_signed<15>(x));
}

struct Drawn {
    float score = -kInf;
    std::int64_t token = -1;

    void consider(float value, std::int64_t id, Stream key, std::int32_t salt) {
        const float uniform = (static_cast<float>(random_bits(key, salt)) + 0.5f) * kUniformScale;
        const float noise = static_cast<float>(__builtin_log(-__builtin_log1p(-static_cast<double>(uniform))));
        const float found = value - noise;
        if (found > score || (found == score && id < token)) {
            score = found;
            token = id;
        }
    }
    // What a bound made with rounded arithmetic must exceed to be looked at.
    float threshold() const { return score - 2e-3f - 4e-7f * __builtin_fabsf(score); }
};

struct RowDraw {
    const Survey& s;
    float divisor;
    Kept kept;
    Stream key;
    const std::int32_t* salts;
    Drawn best;

    void consider(std::int64_t id) {
        const float y = s.row[id] / divisor;
        if (y == -kInf || y < kept.least || (y == kept.least && id > kept.last_id)) return;
        best.consider(y, id, key, salts[id]);
    }

    void block(std::int64_t b) {
        const Reg by = Vec::set1(1.0f / divisor), half = Vec::set1(0.5f), scale = Vec::set1(kUniformScale);
        // ln 2 times (127 minus the bits as a number with 23 binary places).
        const Reg slope = Vec::set1(-0.69314718f / 8388608.0f), start = Vec::set1(127.0f * 0.69314718f);
        const Lanes::ireg low = Lanes::set1(static_cast<std::int32_t>(key.low)), high = Lanes::set1(static_cast<std::int32_t>(key.high));
        const float threshold = best.threshold();
        const Reg bound = Vec::set1(threshold);
        unsigned found[kSamplingBlock / Vec::width];
        unsigned any = 0;
        for (int v = 0; v < kSamplingBlock / Vec::width; ++v) {
            const std::int64_t i = b * kSamplingBlock + v * Vec::width;
            const Reg uniform = Vec::mul(Vec::add(Lanes::to_float(random_bits(low, high, Lanes::load(salts + i))), half), scale);
            const Reg noise = Vec::fma(Lanes::to_float(Lanes::bits(uniform)), slope, start);
            any |= found[v] = Lanes::greater(Vec::fma(Vec::load(s.row + i), by, noise), bound);
        }
        if (!any) return;
        for (int v = 0; v < kSamplingBlock / Vec::width; ++v) {
            for (unsigned left = found[v]; left; left &= left - 1) consider(b * kSamplingBlock + v * Vec::width + __builtin_ctz(left));
        }
    }

    std::int64_t scan() {
        // The likeliest token first: its score rules out most others.
        consider(argmax_of(s));
        for (std::int64_t b = 0; b < s.blocks; ++b) {
            const float y = s.maxima[b] / divisor;
            if (y >= kept.least && y + kLargestNoise > best.threshold()) block(b);
        }
        for (std::int64_t i = s.tail(); i < s.vocab; ++i) consider(i);
        return best.token;
    }

    std::int64_t from_list(const std::uint64_t* list) {
        for (std::int64_t i = 0; i < kept.listed; ++i) {
            const float y = value_of(list[i]);
            if (y + kLargestNoise <= best.threshold()) break;
            const std::int64_t id = id_of(list[i]);
            best.consider(y, id, key, salts[id]);
        }
        return best.token;
    }
};

// ---- the table ----

inline void greedy(const GreedyArgs& a, std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
        // Maxima of stretches, so that a whole row of them fits here whatever the vocabulary.
        const float* row = a.logits + r * a.vocab;
        float best = -kInf;
        std::int64_t at = -1;
        bool has_nan = false;
        for (std::int64_t from = 0; from < a.vocab && !has_nan; from += 1 << 14) {
            float maxima[(1 << 14) / kSamplingBlock];
            const std::int64_t rest = a.vocab - from;
            const Survey s = survey(row + from, rest < (1 << 14) ? rest : 1 << 14, maxima);
            has_nan = s.has_nan;
            if (at >= 0 && !has_nan && !(s.peak > best)) continue;
            best = has_nan ? __builtin_nanf("") : s.peak;
            at = from + argmax_of(s);
        }
        a.scores[r] = best;
        a.tokens[r] = at;
    }
}

inline void draw(const DrawArgs& a, std::int64_t begin, std::int64_t end, float* scratch) {
    const Work work(scratch, a.vocab);
    for (std::int64_t r = begin; r < end; ++r) {
        const float* row = a.logits + r * a.vocab;
        const Survey s = survey(row, a.vocab, work.maxima);
        const float divisor = a.temperature[r] > 0.0f ? a.temperature[r] : 1.0f;
        const float peak = s.has_nan ? __builtin_nanf("") : s.peak / divisor;
        a.scores[r] = peak;
        if (!(a.temperature[r] > 0.0f) || !__builtin_isfinite(peak)) {
            a.tokens[r] = argmax_of(s);
            continue;
        }
        const Kept kept = keep_of(s, divisor, a.top_k[r], a.top_p[r], a.log_min_p[r], work);
        RowDraw drawing{s, divisor, kept, stream_of(a.seed_keys[r], a.positions[r], a.stream_offset), a.salts, {}};
        a.tokens[r] = kept.listed >= 0 ? drawing.from_list(work.list) : drawing.scan();
    }
}

inline void keep(const DrawArgs& a, std::int64_t begin, std::int64_t end, float* scratch) {
    const Work work(scratch, a.vocab);
    for (std::int64_t r = begin; r < end; ++r) {
        float* row = a.logits + r * a.vocab;
        const Survey s = survey(row, a.vocab, work.maxima);
        if (s.has_nan || !__builtin_isfinite(s.peak)) continue;
        const Kept kept = keep_of(s, 1.0f, a.top_k[r], a.top_p[r], a.log_min_p[r], work);
        for (std::int64_t i = 0; i < a.vocab; ++i) {
            if (row[i] < kept.least || (row[i] == kept.least && i > kept.last_id)) row[i] = -kInf;
        }
    }
}

inline void penalize(const PenaltyArgs& a, std::int64_t begin, std::int64_t end, float* scratch) {
    for (std::int64_t n = begin; n < end; ++n) {
        const std::int32_t* counts = a.counts + a.rows[n] * a.vocab;
        if (a.drafts) {
            std::int32_t* with_drafts = reinterpret_cast<std::int32_t*>(scratch);
            __builtin_memcpy(with_drafts, counts, static_cast<std::size_t>(a.vocab) * sizeof(std::int32_t));
            for (std::int64_t d = n * a.drafts; d < (n + 1) * a.drafts; ++d) with_drafts[a.draft_ids[d]] += a.draft_counts[d];
            counts = with_drafts;
        }
        float* row = a.logits + a.lines[n] * a.vocab;
        const float repetition = a.repetition[n], frequency = a.frequency[n], presence = a.presence[n];
        for (std::int64_t i = 0; i < a.vocab;) {
            if (i + Vec::width <= a.vocab && !Lanes::any_set(Lanes::load(counts + i))) {
                i += Vec::width;  // most tokens never occur
                continue;
            }
            const std::int64_t stop = i + Vec::width < a.vocab ? i + Vec::width : a.vocab;
            for (; i < stop; ++i) {
                if (!counts[i]) continue;
                float x = row[i];
                if (repetition != 1.0f) x = x > 0.0f ? x / repetition : x * repetition;
                const std::int32_t times = counts[i] & (a.in_prompt - 1);
                if (times) {
                    if (frequency != 0.0f) x -= static_cast<float>(times) * frequency;
                    if (presence != 0.0f) x -= presence;
                }
                row[i] = x;
            }
        }
    }
}

// The `top` largest of a row into `list`, best first. Returns false when the row holds NaN.
inline bool list_top(const Survey& s, std::int64_t top, const Work& work) {
    if (s.has_nan) return false;
    float bound;
    std::int64_t count = -1;
    if (bound_of(s, top, work.copy, &bound)) count = list_from(s, 1.0f, bound, true, work.list);
    if (count < 0) {
        double before = 0.0;
        const float least = radix_reach(s.row, nullptr, s.vocab, -kInf, static_cast<double>(top), work.buckets, &before);
        count = 0;
        for (std::int64_t i = 0; i < s.vocab; ++i) {
            if (s.row[i] > least) work.list[count++] = pack(s.row[i], i);
        }
        for (std::int64_t i = 0; i < s.vocab && count < top; ++i) {
            if (s.row[i] == least) work.list[count++] = pack(s.row[i], i);
        }
        for (std::int64_t i = 0; i < s.vocab && count < top; ++i) {
            if (s.row[i] < least) work.list[count++] = pack(s.row[i], i);  // -inf, which no bucket holds
        }
    }
    sort_descending(work.list, count);
    return true;
}

inline void logprobs(const LogprobArgs& a, std::int64_t begin, std::int64_t end, float* scratch) {
    const Work work(scratch, a.vocab);
    for (std::int64_t r = begin; r < end; ++r) {
        const float* row = a.logits + r * a.vocab;
        const Survey s = survey(row, a.vocab, work.maxima);
        const float own = row[a.chosen[r]];
        const double mass = s.has_nan || !__builtin_isfinite(s.peak) ? __builtin_nan("") : mass_of(s, 1.0f, s.peak, -kInf);
        const float normalizer = s.peak + static_cast<float>(__builtin_log(mass));
        std::int64_t rank = 0, i = 0;
        for (const Reg bound = Vec::set1(own); i + Vec::width <= a.vocab; i += Vec::width) {
            rank += __builtin_popcount(Lanes::at_least(Vec::load(row + i), bound));
        }
        for (; i < a.vocab; ++i) rank += row[i] >= own;
        std::int64_t* ids = a.ids + r * (1 + a.top);
        float* found = a.logprobs + r * (1 + a.top);
        a.ranks[r] = rank;
        ids[0] = a.chosen[r];
        found[0] = own - normalizer;
        if (a.top == 0) continue;
        const bool is_listed = list_top(s, a.top, work);
        for (std::int64_t j = 0; j < a.top; ++j) {
            ids[1 + j] = is_listed ? id_of(work.list[j]) : j;
            found[1 + j] = (is_listed ? value_of(work.list[j]) : row[j]) - normalizer;
        }
    }
}

}  // namespace canter::CANTER_ISA

namespace canter {

const SamplingTable CANTER_TABLE = {CANTER_ISA::greedy, CANTER_ISA::draw, CANTER_ISA::keep, CANTER_ISA::penalize, CANTER_ISA::logprobs};

}  // namespace canter
