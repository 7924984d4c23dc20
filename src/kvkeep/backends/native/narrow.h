// Products of bfloat16 vectors whose dims lie in pairs, for processors that multiply and add two at a time.

#pragma once

#include <type_traits>

#include "tiles.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512BF16__
constexpr bool PAIRED = W == 16;
#else
constexpr bool PAIRED = false;
#endif

// Whether the processor has such products for this type.
template <class X>
constexpr bool in_pairs() {
    return PAIRED && std::is_same_v<X, BFloat16>;
}

// Add the products of two pairs in each lane.
inline Floats add_products(Floats sum, Ints a, Ints b) {
#ifdef __AVX512BF16__
    if constexpr (PAIRED) return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    (void)a, (void)b;
    return sum;
}

// Write two vectors as bfloat16.
inline void put_narrow(Floats a, Floats b, uint16_t *to) {
#ifdef __AVX512BF16__
    if constexpr (PAIRED) {
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        std::memcpy(to, &both, sizeof both);
    }
#endif
    (void)a, (void)b, (void)to;
}

// Write n numbers, times a factor, as bfloat16. `from` has room for n, rounded up to 2 W.
inline void put_all_narrow(const float *from, float by, uint16_t *to, int64_t n) {
    for (int64_t d = 0; d < n; d += 2 * W) {
        uint16_t part[2 * W];
        put_narrow(load<Floats>(from + d) * by, load<Floats>(from + d + W) * by, part);
        std::memcpy(to + d, part, std::min<int64_t>(2 * W, n - d) * sizeof *to);
    }
}

// The upper half of each number, which is one in bfloat16 and no larger.
inline Floats upper(Floats x) { return (Floats)((Bits)x & 0xffff0000); }

// Write two vectors in their own place as sums of two numbers in bfloat16: pairs of upper halves, then pairs of lower
// ones. What is lost is less than 2^-16 of a number.
inline void put_halves(Floats a, Floats b, float *to) {
    const Bits x = (Bits)a & 0xffff0000, y = (Bits)b & 0xffff0000;
    const Bits less = (Bits)(a - (Floats)x) + 0x8000, rest = (Bits)(b - (Floats)y) + 0x8000;
    store(to, x >> 16 | y);
    store(to + W, less >> 16 | (rest & 0xffff0000));
}

// The two vectors again.
inline Pair from_halves(const float *from) {
    const Pair upper = BFloat16::widen((const uint16_t *)from), lower = BFloat16::widen((const uint16_t *)(from + W));
    return {upper.a + lower.a, upper.b + lower.b};
}

// What comes after the parts so far of x: it has the sign of x and is not 0, so that products with infinities stay so.
inline Floats next_part(Floats x, Floats rest) {
    const Floats part = upper(rest);
    return select((part == part) & (part != 0.0f), part, x * 1e-30f);
}

// Write a vector as the sum of `SPLITS` of narrow numbers, `step` apart. Columns are in the order of `Pair`.
template <class X>
void split(const typename X::T *from, Pairs dim, uint16_t *to, int64_t step) {
    for (int64_t p = 0; p < dim.n; p++, to += 2 * W) {
        const Pair x = pair_of<X>(from, dim, p);
        Pair part = {upper(x.a), upper(x.b)}, rest = x;
        for (int64_t i = 0; i < SPLITS; i++) {
            put_narrow(part.a, part.b, to + i * step);
            rest = {rest.a - part.a, rest.b - part.b};
            part = {next_part(x.a, rest.a), next_part(x.b, rest.b)};
        }
    }
}

// One panel of a head's keys or values. An empty slot reads what another slot holds, and keeps no bit of it.
template <class T>
struct Panel {
    const T *rows[PANEL];
    uint32_t kept[PANEL];  // all bits, or none
    bool empty;

    explicit Panel(const T *const *found) {
        const T *const *const some = std::find_if(found, found + PANEL, [](const T *row) { return row != nullptr; });
        empty = some == found + PANEL;
        for (int64_t j = 0; j < PANEL && !empty; j++) {
            rows[j] = found[j] ? found[j] : *some;
            kept[j] = found[j] ? ~0u : 0u;
        }
    }
};

// Pack one panel of a head's values: a row of pairs for every two slots, W apart as in `put_halves`. Empty slots become
// zeros.
template <class T>
void pack_rows_in_pairs(const Panel<T> &values, int64_t elements, int64_t dim, int32_t *to) {
    std::memset(to, 0, PANEL / 2 * dim * sizeof *to);
    for (int64_t i = 0; i < PANEL / 2 && !values.empty; i++, to += dim) {
        const int64_t j = i / W * 2 * W + i % W;
        const T *const low = values.rows[j], *const high = values.rows[j + W];
        const uint32_t keep_low = values.kept[j], keep_high = values.kept[j + W];
        for (int64_t e = 0; e < elements; e++)
            to[e] = (int32_t)(((uint32_t)low[e] & keep_low) | ((uint32_t)high[e] & keep_high) << 16);
    }
}

// Pack one panel of a head's keys; empty slots become zeros. `dim` is even.
template <class T>
void pack_pairs(const Panel<T> &keys, int64_t elements, int64_t dim, int32_t *to) {
    std::memset(to, 0, PANEL / 2 * dim * sizeof *to);
    if (keys.empty) return;
    for (int64_t p = 0; p < elements / 2; p++)
        for (int64_t j = 0; j < PANEL; j++) {
            uint32_t pair;
            std::memcpy(&pair, keys.rows[j] + 2 * p, sizeof pair);
            to[p * PANEL + j] = (int32_t)(pair & keys.kept[j]);
        }
    for (int64_t j = 0; j < PANEL && elements % 2; j++)
        to[elements / 2 * PANEL + j] = (int32_t)((uint32_t)keys.rows[j][elements - 1] & keys.kept[j]);
}

// Pack a panel of wider keys as `SPLITS` panels of narrow ones. `memory`: for 2 * PANEL * dim.floats() floats.
template <class X>
void pack_split(const typename X::T *const *keys, Pairs dim, float *memory, int32_t *to) {
    const int64_t each = dim.floats(), step = PANEL * each;
    uint16_t *const parts = (uint16_t *)memory;
    for (int64_t j = 0; j < PANEL; j++) split<X>(keys[j], dim, parts + j * each, step);
    for (int64_t i = 0; i < SPLITS; i++) {
        const uint16_t *found[PANEL];
        for (int64_t j = 0; j < PANEL; j++) found[j] = keys[j] ? parts + i * step + j * each : nullptr;
        pack_pairs(Panel<uint16_t>(found), each, each, to + i * step / 2);
    }
}

// Dot products of ROWS queries with a panel of keys.
inline void dots_of_pairs(const int32_t *query, int64_t pairs, const int32_t *keys, float *to, int64_t width) {
    Floats acc[ROWS][TILE] = {};
    for (int64_t p = 0; p < pairs; p++) {
        Ints k[TILE];
        for (int i = 0; i < TILE; i++) k[i] = load<Ints>(keys + p * PANEL + i * W);
        for (int r = 0; r < ROWS; r++) {
            const Ints q = Ints{} + query[r * pairs + p];
            for (int i = 0; i < TILE; i++) acc[r][i] = add_products(acc[r][i], q, k[i]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < TILE; i++) store(to + r * width + i * W, acc[r][i]);
}

}  // namespace
