// Products with quantized weights, which stay packed: codes of 4 to 8 bits, in groups along the inputs.
//
// A weight is scale * code + minimum, both of its group and, but for a power of two, float16. The rows lie in blocks of
// 16: four neighbouring codes of a row make a word, and the words of the 16 rows a vector, so that a product needs no
// sum over lanes. Inputs are rounded to 16 bits, 32 of them to a scale, since 8 bits cost perplexity. Sums within a group
// are exact whole numbers, and those over groups floats in the order of the groups, whatever the number of rows or
// threads.

#pragma once

#include "codes.h"
#include "whole.h"

// Rows of a quantized weight as numbers: those of these indices, or all.
extern "C" struct Unpack {
    int64_t rows, width, threads, type;
    const int64_t *indices;  // null: all rows
    const char *weight;
    char *out;
    int64_t bits, group;
};

namespace {

constexpr int LANES = 16;                // rows of a block
constexpr int64_t INPUT_GROUP = 32;      // inputs that share a scale
constexpr int64_t VECTOR = 64;           // bytes of a word for each row of a block
constexpr float LARGEST_CODE = 0x7f7f;   // what two signed bytes can make
constexpr int64_t PREFETCH_BYTES = 1024;  // bytes of packed weights that are fetched ahead of their use

typedef int32_t Words __attribute__((vector_size(VECTOR)));
typedef float Reals __attribute__((vector_size(VECTOR)));

inline Reals reals(Words numbers) { return __builtin_convertvector(numbers, Reals); }

// How a group lies in memory: words, then the scales of the 16 rows, then their minimums. Of codes with 4 to 6 bits a
// byte has the lower four bits of one code of the group's first half and of one of its second half; the upper bits of
// all codes follow.
template <int BITS, int GROUP>
struct Packing {
    static constexpr int STEPS = GROUP / 4, UPPER = BITS == 8 ? 0 : BITS - 4, HALF = BITS == 8 ? STEPS : STEPS / 2;
    static constexpr int64_t SCALES = VECTOR * (HALF + (UPPER ? 1 : 0)), BYTES = SCALES + 4 * LANES;
    static constexpr int WIDTH = GROUP;
    static_assert(!UPPER || UPPER * STEPS == 8, "the upper bits of a group fill the bytes of a vector");

    // Codes 4 t to 4 t + 3 of each row.
    static Words step(const char *at, int t) {
        const Words words = load<Words>(at + VECTOR * (t % HALF));
        if (BITS == 8) return words;
        const Words lower = (t < HALF ? words : words >> 4) & 0x0f0f0f0f;
        if (!UPPER) return lower;
        const Words upper = load<Words>(at + VECTOR * HALF);
        const int left = 4 - UPPER * t;
        return lower | ((left > 0 ? upper << (left > 0 ? left : 0) : upper >> (left > 0 ? 0 : -left)) &
                        0x01010101 * ((1 << BITS) - 16));
    }

    static int code(const char *at, int lane, int i) {
        const int t = i / 4, byte = 4 * lane + i % 4;
        const int word = (uint8_t)at[VECTOR * (t % HALF) + byte];
        if (BITS == 8) return word;
        const int upper = UPPER ? (uint8_t)at[VECTOR * HALF + byte] >> UPPER * t & ((1 << UPPER) - 1) : 0;
        return (t < HALF ? word & 15 : word >> 4) | upper << 4;
    }

    static const uint16_t *scales(const char *at) { return (const uint16_t *)(at + SCALES); }
    static const uint16_t *minimums(const char *at) { return scales(at) + LANES; }
};

// Call with the packing of these bits and groups; nothing happens for another one.
template <class Call>
inline void by_packing(int64_t bits, int64_t group, const Call &call) {
    if (bits == 4 && group == 32) call(Packing<4, 32>());
    if (bits == 4 && group == 16) call(Packing<4, 16>());
    if (bits == 5 && group == 32) call(Packing<5, 32>());
    if (bits == 6 && group == 16) call(Packing<6, 16>());
    if (bits == 8 && group == 32) call(Packing<8, 32>());
}

inline int64_t block_bytes(int64_t bits, int64_t group, int64_t width) {
    int64_t bytes = 0;
    by_packing(bits, group, [&](auto packing) { bytes = decltype(packing)::BYTES; });
    return 4 * LANES + width / group * bytes;
}

inline Reals widen_lanes(const uint16_t *halves) {
    Reals lanes;
    for (int i = 0; i < LANES; i += W) store((float *)&lanes + i, widen_halves(halves + i));
    return lanes;
}

// Sums of products of codes with whole numbers of two bytes, for each row of a block, as the processor computes them
// fastest. `put` makes two words of four numbers, which `add` takes.
#ifdef KVKEEP_WHOLE
struct Totals {
    Words lower = {}, upper = {};

    static void put(const int32_t *numbers, int32_t *words) {
        int8_t bytes[8];  // the lower bytes first; both bytes are signed
        for (int i = 0; i < 4; i++) {
            bytes[i] = (int8_t)numbers[i];
            bytes[4 + i] = (int8_t)((numbers[i] - bytes[i]) >> 8);
        }
        std::memcpy(words, bytes, sizeof bytes);
    }
    void add(Words codes, const int32_t *words) {
        lower = add_bytes(lower, codes, all(words[0]));
        upper = add_bytes(upper, codes, all(words[1]));
    }
    Words sum() const { return (upper << 8) + lower; }
};
#else
struct Totals {
#ifdef __AVX2__
    __m256i totals[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#else
    Words total = {};
#endif

    static void put(const int32_t *numbers, int32_t *words) {
        for (int i = 0; i < 2; i++) words[i] = (numbers[i] & 0xffff) | (int32_t)((uint32_t)numbers[i + 2] << 16);
    }
#ifdef __AVX2__
    void add(Words codes, const int32_t *words) {
        const __m256i even = _mm256_set1_epi32(words[0]), odd = _mm256_set1_epi32(words[1]);
        for (int i = 0; i < 2; i++) {
            const __m256i half = load<__m256i>((const int32_t *)&codes + 8 * i);
            const __m256i first = _mm256_madd_epi16(_mm256_and_si256(half, _mm256_set1_epi16(255)), even);
            const __m256i second = _mm256_madd_epi16(_mm256_srli_epi16(half, 8), odd);
            totals[i] = _mm256_add_epi32(totals[i], _mm256_add_epi32(first, second));
        }
    }
    Words sum() const { return load<Words>(totals); }
#else
    void add(Words codes, const int32_t *words) {
        for (int i = 0; i < 2; i++) {
            total += (codes >> 8 * i & 255) * (int32_t)(int16_t)words[i];
            total += (codes >> 8 * (i + 2) & 255) * (words[i] >> 16);
        }
    }
    Words sum() const { return total; }
#endif
};
#endif

// ---- inputs ---------------------------------------------------------------------------------------------------------

// Rows of 16-bit codes, and for each group the scale, and the sum of what the codes stand for.
class CodedInputs {
    const int64_t rows, width;
    const Scratch memory;

    int64_t row_floats() const { return up(width / 2 + 2 * (width / INPUT_GROUP) + width / 16, W); }
    float *row(int64_t i) const { return memory.get() + i * row_floats(); }

   public:
    // None if there are no rows.
    CodedInputs(int64_t rows, int64_t width) : rows(rows), width(width), memory(rows * row_floats()) {}

    int32_t *codes(int64_t i) const { return (int32_t *)row(i); }
    float *scales(int64_t i) const { return row(i) + width / 2; }

    template <int GROUP>
    float *sums(int64_t i) const {
        return scales(i) + width / INPUT_GROUP * (GROUP == INPUT_GROUP ? 1 : 2);
    }

    // Round the rows of X. Returns false if there is no memory.
    template <class X>
    bool code(const char *x, int64_t threads) const {
        if (!rows) return true;
        const int64_t bytes = width * (int64_t)sizeof(typename X::T), type = number_of<X>();
        return memory.get() && for_each(rows, rows * bytes, threads, up(width, 2 * W), [&](int64_t i, float *numbers) {
            widen_all(type, x + i * bytes, width, numbers);
            for (int64_t at = 0; at < width; at += INPUT_GROUP) code_group(i, at, numbers + at);
        });
    }

   private:
    template <class X>
    static int64_t number_of() {
        return sizeof(typename X::T) == sizeof(float) ? 0 : std::is_same<X, BFloat16>::value ? 1 : 2;
    }

    // A group with NaN or an infinity has the scale NaN.
    void code_group(int64_t i, int64_t first, const float *x) const {
        Floats most = {};
        for (int k = 0; k < INPUT_GROUP; k += W) {
            const Floats size = size_of(load<Floats>(x + k));
            most = select(size > most, size, most);
        }
        const float top = largest(most);
        const bool tiny = top < 1e-30f;  // where its inverse overflows
        const float scale = !all_finite(x, INPUT_GROUP) ? NAN : tiny ? 0.0f : top / LARGEST_CODE;
        const float inverse = tiny ? 0.0f : LARGEST_CODE / top;
        int32_t numbers[INPUT_GROUP];
        for (int k = 0; k < INPUT_GROUP; k += W)  // to nearest, ties to even
            store(numbers + k, (Ints)(in_register(load<Floats>(x + k) * inverse) + 0x1.8p23f) - 0x4b400000);
        int32_t *to = codes(i) + first / 2, totals[2] = {};
        for (int k = 0; k < INPUT_GROUP; k += 4) Totals::put(numbers + k, to + k / 2);
        for (int k = 0; k < INPUT_GROUP; k++) totals[k / 16] += numbers[k];
        scales(i)[first / INPUT_GROUP] = scale;
        sums<INPUT_GROUP>(i)[first / INPUT_GROUP] = scale * (float)(totals[0] + totals[1]);
        for (int k = 0; k < 2; k++) sums<16>(i)[first / 16 + k] = scale * (float)totals[k];
    }
};

// ---- products -------------------------------------------------------------------------------------------------------

// Products of a block of weights with M rows from `first` on, `apart` floats from row to row.
template <class P, int M>
void block_products(
    const char *block, const CodedInputs &x, int64_t first, int64_t width, float *to, int64_t apart) {
    const int32_t *codes[M];
    const float *scales[M], *totals[M];
    for (int m = 0; m < M; m++) {
        codes[m] = x.codes(first + m), scales[m] = x.scales(first + m);
        totals[m] = x.sums<P::WIDTH>(first + m);
    }
    Reals sums[M] = {};
    const char *at = block + 4 * LANES;
    for (int64_t i = 0; i < width; i += P::WIDTH, at += P::BYTES) {
        Totals products[M];
        for (int64_t line = 0; line < P::BYTES; line += 64) __builtin_prefetch(at + PREFETCH_BYTES + line);
#pragma GCC unroll 8
        for (int t = 0; t < P::STEPS; t++) {
            const Words step = P::step(at, t);
            for (int m = 0; m < M; m++) products[m].add(step, codes[m] + i / 2 + 2 * t);
        }
        const Reals scale = widen_lanes(P::scales(at)), minimum = widen_lanes(P::minimums(at));
        for (int m = 0; m < M; m++)
            sums[m] = sums[m] + reals(products[m].sum()) * (scale * scales[m][i / INPUT_GROUP]) +
                      minimum * totals[m][i / P::WIDTH];
    }
    const Reals factors = load<Reals>(block);
    for (int m = 0; m < M; m++) store(to + m * apart, sums[m] * factors);
}

// Products of the blocks from row `begin` on, for n outputs, with all rows.
inline void quantized_products(const char *weight, int64_t bits, int64_t group, const CodedInputs &x, int64_t rows,
                               int64_t width, int64_t begin, int64_t n, float *to, int64_t apart) {
    by_packing(bits, group, [&](auto packing) {
        typedef decltype(packing) P;
        const int64_t bytes = 4 * LANES + width / P::WIDTH * P::BYTES;
        for (int64_t i = 0; i < n; i += LANES) {
            const char *block = weight + (begin + i) / LANES * bytes;
            int64_t row = 0;
            for (; row + 8 <= rows; row += 8) block_products<P, 8>(block, x, row, width, to + row * apart + i, apart);
            for (; row + 4 <= rows; row += 4) block_products<P, 4>(block, x, row, width, to + row * apart + i, apart);
            for (; row + 2 <= rows; row += 2) block_products<P, 2>(block, x, row, width, to + row * apart + i, apart);
            if (row < rows) block_products<P, 1>(block, x, row, width, to + row * apart + i, apart);
        }
    });
}

// ---- weights as numbers ---------------------------------------------------------------------------------------------

// Write four columns of a block to its rows, INPUT_GROUP floats from row to row.
inline void put_columns(const Reals (&columns)[4], float *to) {
#ifdef KVKEEP_WHOLE
    const Ints words[4] = {(Ints)columns[0], (Ints)columns[1], (Ints)columns[2], (Ints)columns[3]};
    Ints turned[4];
    turn_quarters(words, turned);
    for (int lane = 0; lane < LANES; lane++)
        std::memcpy(to + lane * INPUT_GROUP, (const float *)&turned[lane % 4] + lane / 4 * 4, 4 * sizeof *to);
#else
    for (int lane = 0; lane < LANES; lane++)
        for (int k = 0; k < 4; k++) to[lane * INPUT_GROUP + k] = columns[k][lane];
#endif
}

// Unpack the rows of a block, of which n exist.
template <class P>
void unpack_block(const Unpack &u, const char *block, int64_t n, char *out) {
    const int64_t bytes = bytes_of(u.type);
    const Reals factors = load<Reals>(block);
    const char *at = block + 4 * LANES;
    float tile[(LANES + 1) * INPUT_GROUP];  // narrowing reads a little more than there is
    for (int64_t i = 0; i < u.width; i += P::WIDTH, at += P::BYTES) {
        const Reals scale = widen_lanes(P::scales(at)) * factors, minimum = widen_lanes(P::minimums(at)) * factors;
        for (int t = 0; t < P::STEPS; t++) {
            const Words step = P::step(at, t);
            Reals columns[4];
            for (int k = 0; k < 4; k++) columns[k] = reals(step >> 8 * k & 255) * scale + minimum;
            put_columns(columns, tile + 4 * t);
        }
        for (int64_t lane = 0; lane < n; lane++)
            narrow_all(u.type, tile + lane * INPUT_GROUP, P::WIDTH, out + (lane * u.width + i) * bytes);
    }
}

// Unpack one row of a block. `room`: for a row, rounded up.
template <class P>
void unpack_row(const Unpack &u, const char *block, int lane, float *room, char *out) {
    const float factor = ((const float *)block)[lane];
    const char *at = block + 4 * LANES;
    for (int64_t i = 0; i < u.width; i += P::WIDTH, at += P::BYTES) {
        const float scale = Float16::widen(all(P::scales(at)[lane] << 16))[0] * factor;
        const float minimum = Float16::widen(all(P::minimums(at)[lane] << 16))[0] * factor;
        for (int k = 0; k < P::WIDTH; k++) room[i + k] = (float)P::code(at, lane, k) * scale + minimum;
    }
    narrow_all(u.type, room, u.width, out);
}

inline int64_t unpack(const Unpack &u) {
    const int64_t each = block_bytes(u.bits, u.group, u.width), row_bytes = u.width * bytes_of(u.type);
    bool done = false;
    by_packing(u.bits, u.group, [&](auto packing) {
        typedef decltype(packing) P;
        if (u.indices) {
            done = for_each(u.rows, u.rows * row_bytes, u.threads, up(u.width, 2 * W), [&](int64_t i, float *room) {
                const int64_t row = u.indices[i];
                unpack_row<P>(u, u.weight + row / LANES * each, (int)(row % LANES), room, u.out + i * row_bytes);
            });
            return;
        }
        const int64_t blocks = (u.rows + LANES - 1) / LANES;
        done = for_each_in_order(blocks, u.rows * row_bytes, u.threads, 0, [&](int64_t i, float *) {
            const int64_t n = std::min<int64_t>(LANES, u.rows - i * LANES);
            unpack_block<P>(u, u.weight + i * each, n, u.out + i * LANES * row_bytes);
        });
    });
    return done ? 0 : -1;
}

}  // namespace
