// Products of many rows of bfloat16 numbers in the tile registers of AMX. Weights become tiles, a few blocks of 16 outputs
// at a time, which stay in the second-level cache while all rows are multiplied with them. So quantized weights are never
// in memory as numbers, and sums leave the registers as floats.

#pragma once

#include "quantized.h"
#include "squares.h"

#ifdef KVKEEP_SQUARES

namespace {

constexpr int64_t DEEP = 2 * SQUARE;          // inputs of a tile
constexpr int64_t NUMBERS = SQUARE * DEEP;    // of a tile
constexpr int64_t BOTH = 2 * SQUARE;          // rows, and outputs, that are multiplied at once
constexpr int64_t NEAR_NUMBERS = 1 << 18;     // of the weights that are tiles at a time
constexpr int64_t WORK_OF_A_THREAD = 4;       // at least so many pieces of work

// Rows as tiles on the left, n of up to SQUARE; zeros are what is missing.
inline void put_rows(const uint16_t *x, int64_t n, int64_t width, uint16_t *to) {
    for (int64_t k = 0; k < width; k += DEEP, to += NUMBERS) {
        for (int64_t i = 0; i < n; i++) std::memcpy(to + i * DEEP, x + i * width + k, DEEP * sizeof *to);
        std::memset(to + n * DEEP, 0, (SQUARE - n) * DEEP * sizeof *to);
    }
}

// A line of a tile on the right: two inputs of all outputs of a block.
inline void put_pair(Reals a, Reals b, uint16_t *to) {
    static const __m512i order = [] {
        uint16_t lanes[DEEP];
        for (int i = 0; i < DEEP; i++) lanes[i] = (uint16_t)(i % 2 * SQUARE + i / 2);
        return load<__m512i>(lanes);
    }();
    store(to, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a)));
}

// A block of quantized weights as tiles on the right.
template <class P>
void put_block(const char *block, int64_t width, uint16_t *to) {
    const Reals factors = load<Reals>(block);
    const char *at = block + 4 * LANES;
    for (int64_t i = 0; i < width; i += P::WIDTH, at += P::BYTES) {
        const Reals scale = widen_lanes(P::scales(at)) * factors, minimum = widen_lanes(P::minimums(at)) * factors;
#pragma GCC unroll 8
        for (int t = 0; t < P::STEPS; t++, to += 2 * DEEP) {
            const Words step = P::step(at, t);
            Reals columns[4];
            for (int k = 0; k < 4; k++) columns[k] = reals(step >> 8 * k & 255) * scale + minimum;
            put_pair(columns[0], columns[1], to);
            put_pair(columns[2], columns[3], to + DEEP);
        }
    }
}

// The same of n rows of plain weights; the last one stands for those that are missing.
inline void put_block(const uint16_t *w, int64_t n, int64_t width, uint16_t *to) {
    for (int64_t k = 0; k < width; k += DEEP, to += NUMBERS)
        turn_rows([&](int64_t i) { return (const uint8_t *)(w + std::min(i, n - 1) * width + k); }, VECTOR,
                  [&](int64_t line, Ints words) { store(to + line * DEEP, words); });
}

// Products of BOTH rows with as many outputs, into BOTH floats for each row.
inline void multiply(const uint16_t *x, const uint16_t *w, int64_t width, float *to) {
    const int64_t below = SQUARE * width;
    clear_sums();
    for (int64_t k = 0; k < width; k += DEEP, x += NUMBERS, w += NUMBERS) {
        _tile_loadd(4, x, VECTOR);
        _tile_loadd(6, w, VECTOR);
        _tile_loadd(7, w + below, VECTOR);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x + below, VECTOR);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, to, BOTH * 4);
    _tile_stored(1, to + SQUARE, BOTH * 4);
    _tile_stored(2, to + SQUARE * BOTH, BOTH * 4);
    _tile_stored(3, to + SQUARE * BOTH + SQUARE, BOTH * 4);
    finish_stores();
}

// The products of rows that are tiles, with weights, and the bias.
class ManyRows {
    const int64_t rows, width, threads;
    const bool wide;
    const Scratch memory;

   public:
    ManyRows(int64_t rows, int64_t width, int64_t threads, bool wide)
        : rows(rows), width(width), threads(threads), wide(wide), memory(up(rows, BOTH) * width / 2) {}

    // Make tiles of the rows. Returns false if there is no memory.
    bool prepare(const char *x) const {
        uint16_t *const to = (uint16_t *)memory.get();
        return to && for_each(up(rows, BOTH) / SQUARE, rows * width * 2, threads, 0, [&](int64_t i, float *) {
            const int64_t first = i * SQUARE, n = std::clamp<int64_t>(rows - first, 0, SQUARE);
            put_rows((const uint16_t *)x + first * width, n, width, to + first * width);
        });
    }

    // put(block, tiles) makes tiles of a block of weights. Returns false if there is no memory.
    template <class Put>
    bool multiply_with(int64_t outputs, const char *bias, char *out, const Put &put) const {
        const int64_t pairs = (outputs + BOTH - 1) / BOTH, last = (outputs - 1) / SQUARE;
        const int64_t near = std::max<int64_t>(NEAR_NUMBERS / (BOTH * width), 1);
        const int64_t each = std::clamp<int64_t>(pairs / (WORK_OF_A_THREAD * threads), 1, near);
        const int64_t floats = each * BOTH * width / 2, bytes = rows * outputs * 4;
        const auto work = [&](int64_t i, float *scratch) {
            const Squares registers(true);
            uint16_t *const tiles = (uint16_t *)scratch;
            const int64_t first = i * each, n = std::min(each, pairs - first);
            for (int64_t b = 0; b < 2 * n; b++) put(std::min(2 * first + b, last), tiles + b * SQUARE * width);
            for (int64_t row = 0; row < rows; row += BOTH)
                for (int64_t j = 0; j < n; j++) {
                    float *const sums = scratch + floats;
                    multiply((const uint16_t *)memory.get() + row * width, tiles + j * BOTH * width, width, sums);
                    write(sums, row, (first + j) * BOTH, outputs, bias, out);
                }
        };
        return for_each_in_order((pairs + each - 1) / each, bytes, threads, floats + BOTH * BOTH, work);
    }

   private:
    void write(float *sums, int64_t row, int64_t first, int64_t outputs, const char *bias, char *out) const {
        const int64_t n = std::min(BOTH, outputs - first), each = wide ? 4 : 2;
        float more[BOTH] = {};
        if (bias) widen_all(1, bias + 2 * first, n, more);
        for (int64_t m = 0; m < std::min(BOTH, rows - row); m++, sums += BOTH) {
            char *const to = out + ((row + m) * outputs + first) * each;
            for (int64_t i = 0; i < BOTH; i += W) store(sums + i, load<Floats>(sums + i) + load<Floats>(more + i));
            if (wide) std::memcpy(to, sums, n * sizeof *sums);
            else put_all_narrow(sums, 1.0f, (uint16_t *)to, n);
        }
    }
};

}  // namespace

#endif
