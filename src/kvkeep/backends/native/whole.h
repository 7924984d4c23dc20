// Products of codes with whole numbers, for processors that multiply four bytes with four others at a time and add.
//
// The floats of a query that meet a group of codes become whole numbers of three bytes times a unit. Each errs by half a
// unit, 2^-24 of the largest of them, as one rounding of the largest does. Sums of products with codes are exact.

#pragma once

#include "codes.h"
#include "inner.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define KVKEEP_WHOLE

namespace {

constexpr int BYTES = 3;             // of a whole number
constexpr float LARGEST = 0x7f7f00;  // roundings below the largest number that signed bytes make
constexpr float LEAST = 1e-30f;      // below it a largest float counts as 0

static_assert(W == 16, "lanes are shuffled as those of 512 bits");

// Add to each lane the products of its four bytes.
inline Ints add_bytes(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
}

// The value of sums of products with the bytes of whole numbers, the lowest byte first.
inline Floats value_of(const Ints (&sums)[BYTES]) {
    return floats(sums[2]) * 65536.0f + (floats(sums[1]) * 256.0f + floats(sums[0]));
}

// The largest of floats in size, and whether all of them are finite.
struct Most {
    Floats most = {};
    Ints finite = ~Ints{};

    void see(Floats x) {
        const Floats size = size_of(x);
        most = select(size > most, size, most);
        finite &= size < INFINITY;
    }
};

inline Most most_of(const float *x, int64_t n) {
    Most most;
    for (int64_t i = 0; i < n; i += W) most.see(load<Floats>(x + i, n - i, 0.0f));
    return most;
}

// A unit in which the largest of some floats is LARGEST; 0 if all are tiny, NaN if one is not finite.
struct Unit {
    float size, inverse;

    explicit Unit(const Most &seen) {
        const float most = largest(seen.most);
        size = !all_finite(seen.finite) ? NAN : most < LEAST ? 0.0f : most / LARGEST;
        inverse = size > 0.0f ? LARGEST / most : 0.0f;
    }

    Ints numbers(Floats x) const { return size >= 0.0f ? (Ints)_mm512_cvtps_epi32((__m512)(x * inverse)) : Ints{}; }
};

// A number whose lowest bytes, as signed ones, make this number.
inline Ints signed_bytes(Ints number) { return (number + 0x808080) ^ 0x808080; }

// The lowest bytes of W numbers as words, each with a byte of four numbers: BYTES words for each of up to four steps.
// `width`: from step to step.
inline void put_bytes(Ints numbers, int64_t steps, int64_t width, int32_t *to) {
    const __m512i order = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
    int32_t words[W];
    store(words, (Ints)_mm512_shuffle_epi8((__m512i)numbers, order));
    for (int64_t t = 0; t < std::min<int64_t>(steps, 4); t++)
        std::memcpy(to + t * width, words + 4 * t, BYTES * sizeof *to);
}

// ---- rows of bytes, turned so that lanes are rows -------------------------------------------------------------------

inline Ints low_words(Ints a, Ints b) { return (Ints)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b); }
inline Ints high_words(Ints a, Ints b) { return (Ints)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b); }
inline Ints low_pairs(Ints a, Ints b) { return (Ints)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
inline Ints high_pairs(Ints a, Ints b) { return (Ints)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }

// Two quarters of a, then the same two of b.
template <int FIRST, int SECOND>
inline Ints quarters(Ints a, Ints b) {
    return (Ints)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, FIRST * 17 + SECOND * 68);
}

// Turn the words of four rows within each quarter: lane i of quarter q of to[c] is word c of quarter q of row i.
inline void turn_quarters(const Ints (&rows)[4], Ints *to) {
    const Ints a = low_words(rows[0], rows[1]), b = low_words(rows[2], rows[3]);
    const Ints c = high_words(rows[0], rows[1]), d = high_words(rows[2], rows[3]);
    to[0] = low_pairs(a, b), to[1] = high_pairs(a, b), to[2] = low_pairs(c, d), to[3] = high_pairs(c, d);
}

// The first `bytes` of 32 or 64 bytes, and zeros.
inline __m256i half_row(const uint8_t *from, int64_t bytes) {
    if (bytes >= 32) return load<__m256i>(from);
    return _mm256_maskz_loadu_epi8((1u << bytes) - 1, from);
}

inline Ints whole_row(const uint8_t *from, int64_t bytes) {
    if (bytes >= 64) return load<Ints>(from);
    return (Ints)_mm512_maskz_loadu_epi8((1ull << bytes) - 1, from);
}

// Of W rows, row(i), the first 16 words: put(t, words) where lane i is word t of row i.
template <class Row, class Put>
inline void turn_rows(const Row &row, int64_t bytes, const Put &put) {
    Ints parts[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        Ints four[4];
        for (int k = 0; k < 4; k++) four[k] = whole_row(row(4 * i + k), bytes);
        turn_quarters(four, parts[i]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const Ints a = quarters<0, 1>(parts[0][c], parts[1][c]), b = quarters<0, 1>(parts[2][c], parts[3][c]);
        const Ints d = quarters<2, 3>(parts[0][c], parts[1][c]), e = quarters<2, 3>(parts[2][c], parts[3][c]);
        put(c, quarters<0, 2>(a, b)), put(4 + c, quarters<1, 3>(a, b));
        put(8 + c, quarters<0, 2>(d, e)), put(12 + c, quarters<1, 3>(d, e));
    }
}

// The same of the first 8 words.
template <class Row, class Put>
inline void turn_half_rows(const Row &row, int64_t bytes, const Put &put) {
    Ints parts[2][4];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        Ints four[4];
        for (int k = 0; k < 4; k++) {
            const __m256i one = half_row(row(8 * i + k), bytes), two = half_row(row(8 * i + 4 + k), bytes);
            four[k] = (Ints)_mm512_inserti64x4(_mm512_castsi256_si512(one), two, 1);
        }
        turn_quarters(four, parts[i]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        put(c, quarters<0, 2>(parts[0][c], parts[1][c]));
        put(4 + c, quarters<1, 3>(parts[0][c], parts[1][c]));
    }
}

// ---- keys -----------------------------------------------------------------------------------------------------------

// How a vector of codes lies when it is multiplied as a key: unsigned bytes, four of them a step.
struct Steps {
    int64_t half, each;  // steps of a group's bytes, and of its channels

    explicit Steps(const Grouping &codes)
        : half((codes.bytes + 3) / 4), each(codes.bits == 8 ? half : 2 * half) {}
};

constexpr int SIGN = 128;  // what is added to a code of 8 bits to make it unsigned

// Turn a group of the codes of W keys, row(i), into steps.
template <class C, class Row>
inline void turn_group(const Row &row, const Grouping &codes, const Steps &steps, Ints *to) {
    for (int64_t at = 0; at < codes.bytes; at += 64, to += 16) {
        const int64_t bytes = codes.bytes - at, left = steps.half - at / 4;
        const auto part = [&](int64_t i) { return row(i) + at; };
        const auto put = [=](int64_t t, Ints words) {
            if (t >= left) return;
            to[t] = C::BITS == 8 ? words ^ (int32_t)0x80808080 : words & 0x0f0f0f0f;
            if (C::BITS == 4) to[t + steps.half] = words >> 4 & 0x0f0f0f0f;
        };
        if (bytes > 32) turn_rows(part, bytes, put);
        else turn_half_rows(part, bytes, put);
    }
}

// Add the products of B blocks of W keys, which are `apart`, with N queries, whose words lie side by side. `width`: from
// step to step. `later`: what to fetch beside a step.
template <int B, int N, class Later>
inline void dot_bytes(const Ints *keys, int64_t apart, int64_t steps, const int32_t *queries, int64_t width,
                      const Later &later, Ints (&sums)[B][N][BYTES]) {
    for (int64_t t = 0; t < steps; t++, keys++, queries += width) {
        later(t);
        for (int i = 0; i < N; i++)
            for (int p = 0; p < BYTES; p++) {
                const Ints word = all(queries[i * BYTES + p]);
                for (int b = 0; b < B; b++) sums[b][i][p] = add_bytes(sums[b][i][p], keys[b * apart], word);
            }
    }
}

}  // namespace

#endif
