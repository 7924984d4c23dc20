// Keys and values in 8 or 4 bits per number: see kvkeep/kv/slot_codec.py, whose `encode` and `hadamard` these equal bit for bit.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#ifdef __SSE4_1__
#include <immintrin.h>
#endif

#include "heads.h"
#include "vectors.h"

// How one side of the slots, keys or values, is coded.
extern "C" struct Coded {
    int64_t bits;   // 8 or 4; 0: it is not coded
    int64_t group;  // channels that share a scale
    char *scales;   // float16; dense in the groups of a slot; at 4 bits a group's offset follows its scale
    int64_t scale_row, scale_head, scale_slot;
};

// Of powers of two by which each channel of a key is divided before it is coded, and a query multiplied: a byte for each
// channel of each head; null: all are 0.
extern "C" struct Exponents {
    const int8_t *first;
    int64_t row, head;

    const int8_t *of(int64_t r, int64_t h) const { return first ? first + r * row + h * head : nullptr; }
};

// Of the normals of reflections behind the Hadamard matrix, float32: n for each head, dense; null: there are none.
extern "C" struct Normals {
    const float *first;
    int64_t row, head, n;

    const float *of(int64_t r, int64_t h) const { return first + r * row + h * head; }
};

namespace {

typedef int8_t Signed __attribute__((vector_size(W)));
typedef uint8_t Bytes __attribute__((vector_size(W)));
typedef uint16_t Shorts __attribute__((vector_size(2 * W)));

// W numbers of one or two bytes as numbers of four. Without instructions for it, GCC takes them one by one.
inline Ints wide(const int8_t *from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#elif defined(__SSE4_1__) && !defined(__AVX__)
    return (Ints)_mm_cvtepi8_epi32(_mm_cvtsi32_si128(load<int32_t>(from)));
#else
    return __builtin_convertvector(load<Signed>(from), Ints);
#endif
}

inline Ints wide(const uint8_t *from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#elif defined(__SSE4_1__) && !defined(__AVX__)
    return (Ints)_mm_cvtepu8_epi32(_mm_cvtsi32_si128(load<int32_t>(from)));
#else
    return __builtin_convertvector(load<Bytes>(from), Ints);
#endif
}

inline Ints wide(const uint16_t *from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    return __builtin_convertvector(load<Shorts>(from), Ints);
#endif
}

inline Floats floats(Ints numbers) { return __builtin_convertvector(numbers, Floats); }

// ---- codes as element types, see vectors.h --------------------------------------------------------------------------

// `HALVES`: numbers in float16 of a group of channels, its scale and, if there are two, its offset.

// One code per byte: a pair is 2 W channels, one after the other.
struct Code8 {
    typedef int8_t T;
    static constexpr int EACH = 2 * W, BITS = 8, LEAST = -127, GREATEST = 127, HALVES = 1;
    static Pair widen(const T *from) { return {floats(wide(from)), floats(wide(from + W))}; }
};

// Two codes per byte: W bytes are W channels of the group's first half and W of its second half.
struct Code4 {
    typedef uint8_t T;
    static constexpr int EACH = W, BITS = 4, LEAST = 0, GREATEST = 15, HALVES = 2;
    static Pair widen(const T *from) {
        const Ints both = wide(from);
#if defined(__AVX512F__) && !defined(__clang__)  // one instruction looks up the lowest four bits of each lane
        const Floats all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return {__builtin_shuffle(all, both), __builtin_shuffle(all, both >> 4)};
#else
        return {floats(both & 15), floats(both >> 4)};
#endif
    }
};

// Call with the element type of these codes.
template <class Call>
inline void by_bits(int64_t bits, const Call &call) {
    if (bits == 8) call(Code8());
    else call(Code4());
}

// How a vector of codes lies in memory, and in floats once its codes are widened.
struct Grouping {
    int64_t bits, group, groups, bytes;  // `bytes`: of one group
    Pairs pairs;                         // of one group

    Grouping(const Coded &coded, int64_t dim)
        : bits(coded.bits), group(coded.group), groups(dim / coded.group), bytes(coded.group * coded.bits / 8),
          pairs(bytes, bits == 8 ? 2 * W : W) {}

    int64_t floats() const { return groups * pairs.floats(); }

    // Call(float, channel, count) for runs that hold every channel once.
    template <class Call>
    void each_run(const Call &call) const {
        for (int64_t j = 0; j < groups; j++)
            for (int64_t i = 0; i < pairs.n; i++) {
                const int64_t begin = pairs.begin(i), twice = i * pairs.each - begin, count = pairs.elements() - twice;
                const int64_t at = j * pairs.floats() + 2 * i * W + twice, channel = j * group + begin + twice;
                call(at, channel, count);
                if (bits == 4) call(at + W, channel + bytes, count);
            }
    }
};

// ---- vectors in their own order -------------------------------------------------------------------------------------

// Element types as numbers: see Attend.
inline int64_t bytes_of(int64_t type) { return type == 0 ? 4 : 2; }

// Elements in order, as floats, with zeros behind them up to a multiple of W.
inline void widen_all(int64_t type, const char *from, int64_t n, float *to) {
    if (type == 0) {
        std::memcpy(to, from, n * sizeof *to);
        std::memset(to + n, 0, (up(n, W) - n) * sizeof *to);
        return;
    }
    for (int64_t i = 0; i < n; i += W) {
        uint16_t part[W];
        if (n - i >= W) {
            std::memcpy(part, from + 2 * i, sizeof part);
        } else {
            std::memset(part, 0, sizeof part);
            std::memcpy(part, from + 2 * i, (n - i) * sizeof *part);
        }
        const Ints upper = wide(part) << 16;
        store(to + i, type == 1 ? (Floats)upper : Float16::widen(upper));
    }
}

// Every second float of two vectors, from FIRST on.
template <int FIRST, int... I>
inline Floats every_second(Floats a, Floats b, std::integer_sequence<int, I...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, (2 * I + FIRST)...);
#else
    return __builtin_shuffle(a, b, Ints{(2 * I + FIRST)...});
#endif
}

// Floats in order, narrowed. `from` has room for n, rounded up to 2 W.
inline void narrow_all(int64_t type, const float *from, int64_t n, char *to) {
    if (type == 0) return (void)std::memcpy(to, from, n * sizeof *from);
    const auto lanes = std::make_integer_sequence<int, W>();
    for (int64_t i = 0; i < n; i += 2 * W) {
        const Floats a = load<Floats>(from + i), b = load<Floats>(from + i + W);
        const Pair pair = {every_second<0>(a, b, lanes), every_second<1>(a, b, lanes)};
        uint16_t halves[2 * W];
        if (type == 1) BFloat16::narrow(pair, halves);
        else Float16::narrow(Float16::IN_ORDER ? Pair{a, b} : pair, halves);
        std::memcpy(to + 2 * i, halves, std::min<int64_t>(n - i, 2 * W) * sizeof *halves);
    }
}

// ---- the Hadamard matrix --------------------------------------------------------------------------------------------

// Lanes in the places of those at a distance.
template <int DISTANCE, int... I>
inline Floats across(Floats v, std::integer_sequence<int, I...>) {
#ifdef __clang__
    return __builtin_shufflevector(v, v, (I ^ DISTANCE)...);
#else
    return __builtin_shuffle(v, Ints{(I ^ DISTANCE)...});
#endif
}

// (a + b, a - b) of lanes at a distance.
template <int DISTANCE, int... I>
inline Floats butterflies(Floats v, std::integer_sequence<int, I...> lanes) {
    return across<DISTANCE>(v, lanes) + (Floats)((Ints)v ^ Ints{(I & DISTANCE ? INT32_MIN : 0)...});
}

template <int DISTANCE = 1>
inline Floats all_butterflies(Floats v) {
    if constexpr (DISTANCE < W) {
        v = butterflies<DISTANCE>(v, std::make_integer_sequence<int, W>());
        return all_butterflies<2 * DISTANCE>(v);
    }
    return v;
}

// Butterflies from a distance on, N floats at a time, and the factor that makes the matrix orthonormal.
template <class V, int N>
inline void sylvester(float *x, int64_t size, int64_t distance, float scale) {
    for (; distance < size; distance *= 2)
        for (int64_t i = 0; i < size; i += 2 * distance)
            for (int64_t j = i; j < i + distance; j += N) {
                const V a = load<V>(x + j), b = load<V>(x + j + distance);
                store(x + j, a + b);
                store(x + j + distance, a - b);
            }
    for (int64_t i = 0; i < size; i += N) store(x + i, load<V>(x + i) * scale);
}

// Multiply a block of the matrix, whose size is a power of two, with as many floats, in place.
inline void sylvester(float *x, int64_t size) {
    const float scale = (float)(1.0 / std::sqrt((double)size));
    if (size < W) return sylvester<float, 1>(x, size, 1, scale);
    for (int64_t i = 0; i < size; i += W) store(x + i, all_butterflies(load<Floats>(x + i)));
    sylvester<Floats, W>(x, size, W, scale);
}

// Multiply the matrix, which has a block for each power of two in n, with n floats, in place.
inline void hadamard(float *x, int64_t n) {
    for (int64_t rest = n; rest;) {
        const int64_t size = (int64_t)1 << (63 - __builtin_clzll((uint64_t)rest));
        sylvester(x, size);
        x += size, rest -= size;
    }
}

// Multiply n floats with powers of two (SIGN 1), or divide them by these (SIGN -1); null: leave them as they are.
template <int SIGN>
inline void multiply_by_powers(float *x, const int8_t *exponents, int64_t n) {
    if (!exponents) return;
    for (int64_t i = 0; i < n; i++) {
        const int32_t bits = (127 + SIGN * exponents[i]) << 23;
        float power;
        std::memcpy(&power, &bits, sizeof power);
        x[i] *= power;
    }
}

// ---- reflections -----------------------------------------------------------------------------------------------------

// The sum of all lanes in each lane, added at distances from the largest to 1.
template <int DISTANCE = W / 2>
inline Floats sum_of_halves(Floats v) {
    if constexpr (DISTANCE > 0)
        return sum_of_halves<DISTANCE / 2>(v + across<DISTANCE>(v, std::make_integer_sequence<int, W>()));
    return v;
}

// The product of two vectors in each lane, with sums in the order of slot_codec.py: every 16th channel, then halves.
inline Floats dot_of(const float *a, const float *b, int64_t n) {
    constexpr int64_t EACH = 16 / W;
    // in registers, or compilers add the products before they are rounded
    const auto product = [=](int64_t i) {
        return in_register(load<Floats>(a + i, n - i, 0.0f) * load<Floats>(b + i, n - i, 0.0f));
    };
    Floats total[EACH];
    for (int64_t k = 0; k < EACH; k++) total[k] = product(k * W);
    for (int64_t i = 16; i < n; i += 16)
        for (int64_t k = 0; k < EACH; k++) total[k] += product(i + k * W);
    for (int64_t distance = EACH / 2; distance; distance /= 2)
        for (int64_t k = 0; k < distance; k++) total[k] += total[k + distance];
    return sum_of_halves(total[0]);
}

// Reflect n floats in place, by all normals of a head; BACK: undo it.
template <bool BACK = false>
inline void reflect(float *x, const Normals &normals, int64_t row, int64_t head, int64_t n) {
    for (int64_t j = 0; j < normals.n; j++) {
        const float *normal = normals.of(row, head) + (BACK ? normals.n - 1 - j : j) * n;
        const Floats product = dot_of(normal, x, n);
        for (int64_t i = 0; i < n; i += W) {
            const Floats part = in_register(load<Floats>(normal + i, n - i, 0.0f) * product);
            store(x + i, load<Floats>(x + i, n - i, 0.0f) - part, n - i);
        }
    }
}

// ---- scales ---------------------------------------------------------------------------------------------------------

inline Floats widen_halves(const uint16_t *from) {
#ifdef KVKEEP_HALVES
    return Float16::ahead(from);
#else
    return Float16::widen(wide(from) << 16);
#endif
}

// A code times the scale, and the offset added, is the channel.
struct Scaling {
    Floats scale, offset;
};

// Numbers that belong to W slots, of which n exist; the last one is repeated for the others.
template <class V, class Number>
inline V of_slots(const uint16_t *first, int64_t stride, int64_t n) {
    if (stride * 2 == (int64_t)sizeof(Number) && n >= W) return load<V>(first);
    Number part[W];
    for (int64_t i = 0; i < W; i++) std::memcpy(part + i, first + (i < n ? i : n - 1) * stride, sizeof *part);
    return load<V>(part);
}

// The scalings of a group of W slots.
template <class C>
inline Scaling scalings_of(const uint16_t *first, int64_t stride, int64_t n) {
    if constexpr (C::HALVES == 1) {
        const Shorts scales = of_slots<Shorts, uint16_t>(first, stride, n);
        return {widen_halves((const uint16_t *)&scales), Floats{}};
    } else {
        const Ints both = of_slots<Ints, uint32_t>(first, stride, n);
        return {Float16::widen(both << 16), Float16::widen(both & (int32_t)0xffff0000)};
    }
}

// ---- writing a token ------------------------------------------------------------------------------------------------

inline Floats size_of(Floats x) { return (Floats)((Ints)x & INT32_MAX); }
inline bool all_finite(Ints finite) { return !any(~finite); }

// Whether the first n floats, and the zeros behind them, are finite.
inline bool all_finite(const float *x, int64_t n) {
    Ints finite = ~Ints{};
    for (int64_t i = 0; i < n; i += W) finite &= size_of(load<Floats>(x + i)) < INFINITY;
    return all_finite(finite);
}

// A number as the nearest finite float16.
struct Half {
    uint16_t bits = 0;
    float value = 0.0f;

    Half() = default;
    explicit Half(float x) : bits((uint16_t)Float16::round(all(std::min(std::max(x, -65504.0f), 65504.0f)))[0]),
                             value(Float16::widen(all((int32_t)bits << 16))[0]) {}
};

// The least and the greatest of n floats or, with SIZES, 0 and the largest in size.
template <bool SIZES>
inline std::pair<float, float> range_of(const float *x, int64_t n) {
    Floats least = all(SIZES ? 0.0f : x[0]), most = least;
    for (int64_t i = 0; i < n; i += W) {
        const Floats each = load<Floats>(x + i, n - i, x[0]), number = SIZES ? size_of(each) : each;
        least = select(number < least, number, least);
        most = select(number > most, number, most);
    }
    return {smallest(least), largest(most)};
}

// The scale and offset of a group, and its codes; a group that holds NaN or an infinity is all zeros. Its end is the end
// of a vector of W floats, or there are zeros up to there.
template <class C>
inline void code_group(const float *x, int64_t n, int32_t *codes, uint16_t *halves) {
    Half offset, scale;
    if (all_finite(x, n)) {
        const auto [least, most] = range_of<C::HALVES == 1>(x, n);
        if (C::HALVES == 2) offset = Half(least + 0.0f);  // - 0.0 + 0.0 = 0.0
        scale = Half(std::max((most - offset.value) / (float)C::GREATEST, 0.0f) + 0.0f);
    }
    halves[0] = scale.bits;
    if (C::HALVES == 2) halves[1] = offset.bits;
    const float first = (float)C::LEAST, last = (float)C::GREATEST;
    for (int64_t i = 0; i < n; i += W) {
        Floats code = scale.bits ? (load<Floats>(x + i) - offset.value) / scale.value : Floats{};
        code = select(code > last, all(last), select(code < first, all(first), code));
        store(codes + i, __builtin_convertvector((code + 0x1.8p23f) - 0x1.8p23f, Ints));  // to nearest, ties to even
    }
}

// Code a vector into a slot. `codes`: room for a group, rounded up to W.
template <class C>
inline void code_vector(
    const float *x, Grouping grouping, int32_t *__restrict codes, char *__restrict numbers, uint16_t *scales) {
    for (int64_t j = 0; j < grouping.groups; j++, numbers += grouping.bytes) {
        code_group<C>(x + j * grouping.group, grouping.group, codes, scales + j * C::HALVES);
        const int32_t *second = codes + grouping.bytes;
        for (int64_t i = 0; i < grouping.bytes; i++)
            numbers[i] = (char)(C::BITS == 8 ? codes[i] : codes[i] | second[i] << 4);
    }
}

}  // namespace
