// The innermost loops of attention over slots: dot products with keys, and weighted sums of values.

#pragma once

#include <type_traits>

#include "vectors.h"

namespace {

constexpr int GROUP = 4;         // query heads that are worked on at a time
constexpr int SPAN = 128;        // slots whose values stay in the nearest cache while all query heads and dims use them
constexpr int64_t AHEAD = 4096;  // bytes of keys or values that are fetched ahead of their use

// Fetch n elements into the second-level cache; fetching into the first does not pay. The address may be invalid.
template <class T>
inline void fetch(const T *from, int64_t n) {
    for (int64_t i = 0; i < n * (int64_t)sizeof(T); i += 64) __builtin_prefetch((const char *)from + i, 0, 2);
}

// Keys or values, one behind the other.
template <class T>
struct Rows {
    const T *first;
    int64_t stride;

    const T *at(int64_t i) const { return first + i * stride; }
    Rows from(int64_t i) const { return {at(i), stride}; }
};

template <class X>
inline int64_t rows_ahead(int64_t dim) {
    return AHEAD / (dim * (int64_t)sizeof(typename X::T));
}

// Dot products of N queries with the W keys of a block, of which n exist; the last one is repeated for the others.
// `width`: floats from query to query. `later` are the rows to fetch ahead; none if they start nowhere.
template <class X, int N, bool IN_PLACE>
inline void dots(const float *query, int64_t width, Pairs pairs, Rows<typename X::T> keys, int64_t n,
                 Rows<typename X::T> later, Floats *logits) {
    Floats parts[N][W / TILE];
    for (int s = 0; s < W; s += TILE) {
        const typename X::T *key[TILE];
        for (int i = 0; i < TILE; i++) key[i] = keys.at(s + i < n ? s + i : n - 1);
        if (later.first)
            for (int i = 0; i < TILE; i++) fetch(later.at(s + i), pairs.dim);
        Floats acc[N][TILE] = {};
        const auto add = [&](int64_t at, int64_t begin) {
            Pair k[TILE];
            for (int i = 0; i < TILE; i++)
                k[i] = IN_PLACE ? X::widen(key[i] + begin) : widen<X>(key[i], pairs.dim);
            for (int g = 0; g < N; g++) {
                const float *q = query + g * width + at;
                const Floats a = in_register(load<Floats>(q)), b = in_register(load<Floats>(q + W));
                for (int i = 0; i < TILE; i++) acc[g][i] += a * k[i].a;
                for (int i = 0; i < TILE; i++) acc[g][i] += b * k[i].b;
            }
        };
        int64_t at = 0, d = 0;
        for (; d + X::EACH <= pairs.dim; d += X::EACH, at += 2 * W) add(at, d);
        if (d < pairs.dim) add(at, pairs.dim - X::EACH);
        for (int g = 0; g < N; g++) parts[g][s / TILE] = gather<TILE, W>(acc[g]);
    }
    for (int g = 0; g < N; g++) logits[g] = gather<W / TILE, W / TILE>(parts[g]);
}

// Add the values of n slots, weighted for N query heads, to the outputs: M pairs of the head dim. `slots`: from head to
// head in the weights; `width`: in the outputs. A hidden slot is not read, as it may hold NaN.
template <class X, int N, int M, bool IN_PLACE>
inline void mix(const float *p, int64_t slots, const int32_t *shown, Rows<typename X::T> values, int64_t n, Pairs pairs,
                int64_t first, int64_t width, float *out) {
    const int64_t ahead = rows_ahead<X>(pairs.dim);
    int64_t begin[M];
    for (int m = 0; m < M; m++) begin[m] = pairs.begin(first + m);
    Pair acc[N][M];
    for (int g = 0; g < N; g++)
        for (int m = 0; m < M; m++) acc[g][m] = Float32::widen(out + g * width + 2 * (first + m) * W);
    for (int64_t s = 0; s < n; s++) {
        if (!shown[s]) continue;
        const typename X::T *value = values.at(s);
        fetch(values.at(s + ahead) + begin[0], M * X::EACH);
        Pair v[M];
        for (int m = 0; m < M; m++)
            v[m] = IN_PLACE ? X::widen(value + begin[m]) : widen<X>(value, pairs.dim);
        for (int g = 0; g < N; g++) {
            const Floats weight = all(p[g * slots + s]);
            for (int m = 0; m < M; m++) {
                acc[g][m].a += weight * v[m].a;
                acc[g][m].b += weight * v[m].b;
            }
        }
    }
    for (int g = 0; g < N; g++)
        for (int m = 0; m < M; m++) Float32::narrow(acc[g][m], out + g * width + 2 * (first + m) * W);
}

// Call with a compile-time number of query heads, GROUP at a time.
template <class Call>
inline void by_group(int64_t group, const Call &call) {
    int64_t g = 0;
    for (; g + GROUP <= group; g += GROUP) call(g, std::integral_constant<int, GROUP>());
    if (group - g == 3) call(g, std::integral_constant<int, 3>());
    if (group - g == 2) call(g, std::integral_constant<int, 2>());
    if (group - g == 1) call(g, std::integral_constant<int, 1>());
}

// Call with numbers of pairs, known when compiled, that make up all pairs, and whether they are read in place.
template <class Call>
inline void by_pairs(Pairs pairs, const Call &call) {
    constexpr int M = TILE / 2;
    int64_t i = 0;
    if (!pairs.in_place()) return call(0, std::integral_constant<int, 1>(), std::false_type());
    for (; i + M <= pairs.n; i += M) call(i, std::integral_constant<int, M>(), std::true_type());
    for (; i < pairs.n; i++) call(i, std::integral_constant<int, 1>(), std::true_type());
}

}  // namespace
