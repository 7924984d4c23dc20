// Vectors of floats, in the vector extensions of GCC and Clang, for x86 and ARM. So nothing here needs -ffast-math,
// which ignores NaN and infinity and, in a shared library, makes the whole process flush denormal numbers.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

// W floats make a vector. The registers hold the sums of TILE vectors for each of four others.
#if defined(__AVX512F__)
constexpr int W = 16, TILE = 4;  // 32 registers
#elif defined(__AVX__)
constexpr int W = 8, TILE = 2;  // 16 registers
#elif defined(__x86_64__)
constexpr int W = 4, TILE = 2;
#else
constexpr int W = 4, TILE = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));

template <class V, class T>
inline V load(const T *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V, class T>
inline void store(T *to, V v) {
    std::memcpy(to, &v, sizeof v);
}

template <class V, class T>
inline void store(T *to, V v, int64_t n) {
    if (n >= W) store(to, v);  // of a length that compilers know: one instruction
    else std::memcpy(to, &v, n * sizeof *to);
}

// The first n of W elements; the others get a value that stands for none.
template <class V, class T>
inline V load(const T *from, int64_t n, T none) {
    if (n >= W) return load<V>(from);
    T part[W];
    for (int i = 0; i < W; i++) part[i] = i < n ? from[i] : none;
    return load<V>(part);
}

inline Floats all(float x) { return x - Floats{}; }
inline Ints all(int32_t x) { return x - Ints{}; }
inline Ints select(Ints which, Ints yes, Ints no) { return (which & yes) | (~which & no); }
inline Floats select(Ints which, Floats yes, Floats no) { return (Floats)select(which, (Ints)yes, (Ints)no); }

// The larger of two numbers, lane by lane; the second one if either is NaN.
inline Floats larger(Floats x, Floats y) {
#ifdef __AVX512F__
    return (Floats)_mm512_max_ps((__m512)x, (__m512)y);  // compilers find two instructions
#else
    return x > y ? x : y;
#endif
}

// Keep a number in a register: compilers tend to load it again for each use, and loads are the bottleneck here.
inline Floats in_register(Floats x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
    return x;
}

// ---- element types --------------------------------------------------------------------------------------------------

// Elements are widened two vectors at a time, in an order that costs nothing: half-precision numbers lie in pairs, so
// one vector gets the even ones and the other the odd ones, unless the processor widens numbers that follow each other.
// Queries, sums and outputs use the same order, and narrowing restores the original one.
struct Pair {
    Floats a, b;
};

struct Float32 {
    typedef float T;
    static constexpr int EACH = 2 * W;  // elements that make a pair
    static Pair widen(const T *from) { return {load<Floats>(from), load<Floats>(from + W)}; }
    static void narrow(Pair x, T *to) {
        store(to, x.a);
        store(to + W, x.b);
    }
};

struct BFloat16 {
    typedef uint16_t T;
    static constexpr int EACH = 2 * W;
    static Pair widen(const T *from) {
        const Bits both = load<Bits>(from);
        return {(Floats)(both << 16), (Floats)(both & 0xffff0000)};
    }
    static void narrow(Pair x, T *to) { store(to, (round(x.a) >> 16) | (round(x.b) & 0xffff0000)); }
    static Bits round(Floats x) {  // the result in the upper half; to nearest, ties to even
        const Bits u = (Bits)x;
        return (Bits)select(x != x, (Ints)(u | 0x400000), (Ints)(u + 0x7fff + ((u >> 16) & 1)));
    }
};

struct Float16 {
    typedef uint16_t T;
    static constexpr int EACH = 2 * W;
#if defined(__AVX512F__)
#define KVKEEP_HALVES
    static Floats ahead(const T *from) { return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }
    static void back(Floats x, T *to) {
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
    }
#elif defined(__F16C__) && defined(__AVX__)
#define KVKEEP_HALVES
    static Floats ahead(const T *from) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
    static void back(Floats x, T *to) {
        _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
#ifdef KVKEEP_HALVES
    static constexpr bool IN_ORDER = true;
    static Pair widen(const T *from) { return {ahead(from), ahead(from + W)}; }
    static void narrow(Pair x, T *to) {
        back(x.a, to);
        back(x.b, to + W);
    }
#else
    static constexpr bool IN_ORDER = false;
    static Pair widen(const T *from) {
        const Ints both = load<Ints>(from);
        return {widen(both << 16), widen(both)};
    }
    static void narrow(Pair x, T *to) { store(to, round(x.a) | (round(x.b) << 16)); }
#endif
    static Floats widen(Ints upper) {  // the product rebiases the exponent, of denormals as well
        const Ints small = (upper >> 3) & (int32_t)0x8fffe000, special = (small & 0x0f800000) == 0x0f800000;
        return (Floats)((Ints)((Floats)small * 0x1p112f) | (special & 0x7f800000));
    }
    static Bits round(Floats x) {
        const Bits u = (Bits)x, size = u & 0x7fffffff;
        const Bits normal = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
        const Bits denormal = (Bits)((Floats)size + 0.5f) - 0x3f000000;
        Ints found = select(size < 0x38800000, (Ints)denormal, (Ints)normal);
        found = select(size >= 0x477ff000, all(0x7c00), found);  // from 65520 on infinity is nearest
        found = select(size > 0x7f800000, all(0x7e00), found);
        return (Bits)found | ((u >> 16) & 0x8000);
    }
};

// A vector of `dim` elements as pairs made of `each` elements. The last pair ends where the vector ends, so it overlaps
// the pair before unless dim is a multiple of `each`. Only vectors shorter than `each` are not read in place.
struct Pairs {
    int64_t dim, each, n;

    explicit Pairs(int64_t dim, int64_t each = 2 * W) : dim(dim), each(each), n((dim + each - 1) / each) {}
    bool in_place() const { return dim >= each; }
    int64_t floats() const { return n * 2 * W; }
    int64_t elements() const { return in_place() ? each : dim; }  // of each pair
    int64_t begin(int64_t i) const {
        const int64_t at = i * each;
        return in_place() && at + each > dim ? dim - each : at;
    }
};

// The first n elements, padded with zeros; the first `without` of them become zeros, too.
template <class X>
inline Pair widen(const typename X::T *from, int64_t n, int64_t without = 0) {
    typename X::T part[X::EACH] = {};
    std::memcpy(part, from, n * sizeof *from);
    std::memset(part, 0, without * sizeof *from);
    return X::widen(part);
}

template <class X>
inline void narrow(Pair x, typename X::T *to, int64_t n) {
    typename X::T part[X::EACH];
    X::narrow(x, part);
    std::memcpy(to, part, n * sizeof *to);
}

// ---- functions of vectors -------------------------------------------------------------------------------------------

// A polynomial, the highest coefficient first.
template <int N>
inline Floats polynomial(Floats x, const float (&coefficients)[N]) {
    Floats y = all(coefficients[0]);
    for (int i = 1; i < N; i++) y = y * x + coefficients[i];
    return y;
}

// e to the x, to two units in the last place; 0 below -87.3, infinity above 88.7, NaN of NaN.
inline Floats exp(Floats x) {
    const Ints inside = (x >= -87.3f) & (x <= 88.7f);
    const Floats y = select(inside, x, Floats{});
    const Floats n = (y * 1.44269504f + 0x1.8p23f) - 0x1.8p23f;  // the nearest whole number
    const Floats r = y - n * 0x1.62ep-1f - n * 3.19461833e-5f;   // y - n log 2, with log 2 in two parts
    const Floats p = polynomial(r, {1.38131448e-3f, 8.36941879e-3f, 4.16684560e-2f, 0.166665152f, 0.499999940f});
    const Floats power = (Floats)((Ints)(p * (r * r) + r + 1.0f) + (__builtin_convertvector(n, Ints) << 23));
    return select(inside, power, select(x > 88.7f, all(INFINITY), select(x < -87.3f, Floats{}, x)));
}

// The same for numbers that are not above 88.7, in fewer steps. The lowest bits of `shifted` are an exponent.
inline Floats exp_of_small(Floats x) {
    constexpr float MIDDLE = 0x1.8p23f + 126.0f;
    const Floats inside = larger(all(-87.3f), x);
    const Floats shifted = inside * 1.44269504f + MIDDLE, f = inside * 1.44269504f - (shifted - MIDDLE);
    const Floats p = polynomial(f, {2.65294544e-3f, 1.93430253e-2f, 0.111014675f, 0.480444842f, 1.38629396f, 2.0f});
    return p * (Floats)((Ints)shifted << 23);  // twice a power of two, times the power below; the lowest power is 0
}

inline Floats tanh(Floats x) {
    const Floats size = (Floats)((Ints)x & INT32_MAX), square = x * x;
    const Floats p = polynomial(square, {-6.64748671e-3f, 2.12979913e-2f, -5.38991913e-2f, 0.133329645f, -0.333333284f});
    const Floats small = p * square * size + size, large = 1.0f - 2.0f / (exp(size + size) + 1.0f);
    return (Floats)((Ints)select(size < 0.5f, small, large) | ((Ints)x & INT32_MIN));
}

inline float sum(Floats v) {
    float total = 0.0f;
    for (int i = 0; i < W; i++) total += v[i];
    return total;
}

inline int32_t sum(Ints v) {
    int32_t total = 0;
    for (int i = 0; i < W; i++) total += v[i];
    return total;
}

inline bool any(Ints v) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;  // compilers find nothing as short
#else
    int64_t part[W / 2], found = 0;
    std::memcpy(part, &v, sizeof v);
    for (int i = 0; i < W / 2; i++) found |= part[i];
    return found != 0;
#endif
}

inline float largest(Floats v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);  // compilers compare one number after the other
#else
    float most = v[0];
    for (int i = 1; i < W; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

template <class V>
inline auto smallest(V v) {
    auto least = v[0];
    for (int i = 1; i < W; i++) least = v[i] < least ? v[i] : least;
    return least;
}

// The lane of two vectors of N-lane segments that moves to lane i when the first halves of all segments are collected.
constexpr int place(int i, int N) {
    const int segment = i / (N / 2), each = W / N;
    return (segment < each ? segment * N : W + (segment - each) * N) + i % (N / 2);
}

// Fold two vectors of N-lane segments into one with twice as many segments, half as long, with the same sums.
template <int N, int... I>
inline Floats fold(Floats a, Floats b, std::integer_sequence<int, I...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, place(I, N)...) + __builtin_shufflevector(a, b, (place(I, N) + N / 2)...);
#else
    return __builtin_shuffle(a, b, Ints{place(I, N)...}) + __builtin_shuffle(a, b, Ints{(place(I, N) + N / 2)...});
#endif
}

// Fold COUNT vectors of N-lane segments into the first; the segments keep their order.
template <int COUNT, int N>
inline Floats gather(Floats *parts) {
    if constexpr (COUNT > 1) {
        for (int i = 0; i < COUNT / 2; i++)
            parts[i] = fold<N>(parts[2 * i], parts[2 * i + 1], std::make_integer_sequence<int, W>());
        gather<COUNT / 2, N / 2>(parts);
    }
    return parts[0];
}

}  // namespace
