// Products of squares of bfloat16 numbers in the tile registers of AMX, which some x86 processors have. Such a register
// holds 16 rows of 64 bytes: 16 x 32 numbers on the left, 16 pairs of rows x 16 on the right, 16 x 16 floats as the
// sum. Weights of values are two numbers each, an upper and a lower half, so that they lose less than 2^-16.

#pragma once

#include "narrow.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512DQ__) && \
    defined(__linux__)
#define KVKEEP_SQUARES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t AWAKE_ROWS = 8;   // rows whose weights of a piece take less time than it takes to fall asleep
constexpr int64_t NEAR_PANELS = 4;  // panels whose values stay in the nearest cache while all rows use them

// Whether the processor has such registers, and Linux lets this process use them.
inline bool has_squares() {
#ifdef KVKEEP_SQUARES
    constexpr long REQUEST = 0x1023, REGISTERS = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, REGISTERS) == 0;
    return PAIRED && PANEL == 4 * SQUARE && allowed;
#else
    return false;
#endif
}

// Lays out this thread's registers, and gives them back: others on this thread lay them out anew for themselves.
class Squares {
    const bool used;

   public:
    explicit Squares(bool used) : used(used) {
#ifdef KVKEEP_SQUARES
        struct Layout {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        };
        alignas(64) static constexpr Layout layout;  // no variable: compilers do not know that all of it is read
        if (used) _tile_loadconfig(&layout);
#endif
    }
    ~Squares() {
#ifdef KVKEEP_SQUARES
        if (used) _tile_release();
#endif
    }
    Squares(const Squares &) = delete;
};

// The unit of squares falls asleep after some 1,500 cycles without a product, and takes some 800 to wake up. So work of
// other units calls this in between.
inline void stay_awake() {
#ifdef KVKEEP_SQUARES
    _tile_dpbf16ps(7, 5, 6);  // a sum that nobody reads
#endif
}

// `exp_of_small` in fewer steps, to 2^-18, for weights that become halves. Tiny ones are 0 at once: to find that they are
// denormal numbers takes a processor 20 times as long.
inline Floats exp_for_halves(Floats x) {
#ifdef KVKEEP_SQUARES
    const __m512 power = (__m512)(x * 1.44269504f + 0.5f);
    const __mmask16 not_tiny = _mm512_cmp_ps_mask(power, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);  // NaN is not
    const Floats f = (Floats)_mm512_reduce_ps(power, _MM_FROUND_TO_NEG_INF);  // what is above a whole number
    const Floats p = polynomial(f, {1.32647273e-3f, 6.35533081e-3f, 3.94804925e-2f, 0.169810593f, 0.490133822f,
                                    0.707106709f});  // 2^(f - 1/2)
    return (Floats)_mm512_maskz_scalef_ps(not_tiny, (__m512)p, power);
#else
    return exp_of_small(x);
#endif
}

// Compilers do not know that loading a square reads memory.
inline void finish_stores() { asm volatile("" ::: "memory"); }

#ifdef KVKEEP_SQUARES
// The sums of SQUARE queries and a panel of keys.
inline void clear_sums() {
    finish_stores();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

inline void store_sums(float *to, int64_t width) {
    _tile_stored(0, to, width * 4);
    _tile_stored(1, to + SQUARE, width * 4);
    _tile_stored(2, to + 2 * SQUARE, width * 4);
    _tile_stored(3, to + 3 * SQUARE, width * 4);
}
#endif

// Dot products of SQUARE queries with a panel of keys. Both lie in pairs, as in narrow.h.
inline void dots_in_squares(const int32_t *query, int64_t pairs, const int32_t *keys, float *to, int64_t width) {
#ifdef KVKEEP_SQUARES
    clear_sums();
    for (int64_t p = 0; p < pairs; p += SQUARE) {
        const int32_t *const k = keys + p * PANEL;
        _tile_loadd(4, query + p, pairs * 4);
        _tile_loadd(5, k, PANEL * 4);
        _tile_loadd(6, k + SQUARE, PANEL * 4);
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, k + 2 * SQUARE, PANEL * 4);
        _tile_loadd(6, k + 3 * SQUARE, PANEL * 4);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 6);
    }
    store_sums(to, width);
#else
    (void)query, (void)pairs, (void)keys, (void)to, (void)width;
#endif
}

// The same for vectors that are sums of `SPLITS` narrow ones, which follow each other in a query and in a panel. Products
// of two small ones are left out: each is less than 2^-24 of the product of the largest.
inline void dots_of_split(const int32_t *query, int64_t pairs, const int32_t *keys, float *to, int64_t width) {
#ifdef KVKEEP_SQUARES
    const int64_t each = pairs / SPLITS, step = PANEL * each;
    clear_sums();
    for (int64_t p = 0; p < each; p += SQUARE) {
        const int32_t *const k = keys + p * PANEL;
        _tile_loadd(4, query + p, pairs * 4);
        _tile_loadd(5, query + each + p, pairs * 4);
        _tile_loadd(6, query + 2 * each + p, pairs * 4);
#define KVKEEP_QUARTER(I)                                 \
    _tile_loadd(7, k + I * SQUARE, PANEL * 4);            \
    _tile_dpbf16ps(I, 4, 7);                              \
    _tile_dpbf16ps(I, 5, 7);                              \
    _tile_dpbf16ps(I, 6, 7);                              \
    _tile_loadd(7, k + step + I * SQUARE, PANEL * 4);     \
    _tile_dpbf16ps(I, 4, 7);                              \
    _tile_dpbf16ps(I, 5, 7);                              \
    _tile_loadd(7, k + 2 * step + I * SQUARE, PANEL * 4); \
    _tile_dpbf16ps(I, 4, 7);
        KVKEEP_QUARTER(0)
        KVKEEP_QUARTER(1)
        KVKEEP_QUARTER(2)
        KVKEEP_QUARTER(3)
#undef KVKEEP_QUARTER
    }
    store_sums(to, width);
#else
    (void)query, (void)pairs, (void)keys, (void)to, (void)width;
#endif
}

// Add the values of n panels, weighted by the probabilities of SQUARE or, if BOTH, twice as many queries, to two squares
// of each one's outputs. `width`: from query to query in the weights, which are halves; `ids`: where each panel lies in
// the values.
template <bool BOTH>
inline void mix_in_squares(const float *p, int64_t width, const int32_t *values, const int32_t *ids, int64_t n,
                           int64_t dim, float *out) {
#ifdef KVKEEP_SQUARES
    finish_stores();
    float *const below = out + SQUARE * dim;
    _tile_loadd(0, out, dim * 4);
    _tile_loadd(1, out + SQUARE, dim * 4);
    if constexpr (BOTH) _tile_loadd(2, below, dim * 4);
    if constexpr (BOTH) _tile_loadd(3, below + SQUARE, dim * 4);
    for (int64_t c = 0; c < n; c++)
        for (int64_t i = 0; i < PANEL; i += 2 * SQUARE) {
            const int32_t *const v = values + (ids[c] * PANEL + i) / 2 * dim;
            _tile_loadd(6, v, dim * 4);
            _tile_loadd(7, v + SQUARE, dim * 4);
            for (int64_t half = 0; half < 2; half++) {
                const float *const weights = p + c * PANEL + i + half * SQUARE;
                _tile_loadd(4, weights, width * 4);
                if constexpr (BOTH) _tile_loadd(5, weights + SQUARE * width, width * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if constexpr (BOTH) _tile_dpbf16ps(2, 5, 6);
                if constexpr (BOTH) _tile_dpbf16ps(3, 5, 7);
            }
        }
    _tile_stored(0, out, dim * 4);
    _tile_stored(1, out + SQUARE, dim * 4);
    if constexpr (BOTH) _tile_stored(2, below, dim * 4);
    if constexpr (BOTH) _tile_stored(3, below + SQUARE, dim * 4);
#else
    (void)p, (void)width, (void)values, (void)ids, (void)n, (void)dim, (void)out;
#endif
}

// Add the values of all panels, weighted by the probabilities of the rows, to the outputs, whose columns are in order.
inline void mix_panels_in_squares(const float *p, int64_t width, int64_t rows, const float *packed, const int32_t *ids,
                                  int64_t panels, int64_t dim, float *out) {
    const int32_t *const values = (const int32_t *)packed;
    for (int64_t c = 0; c < panels; c += NEAR_PANELS)
        for (int64_t d = 0; d < dim; d += 2 * SQUARE) {
            const int64_t n = std::min(NEAR_PANELS, panels - c);
            int64_t r = 0;
            for (; r + 2 * SQUARE <= rows; r += 2 * SQUARE)
                mix_in_squares<true>(p + r * width + c * PANEL, width, values + d, ids + c, n, dim, out + r * dim + d);
            if (r < rows)
                mix_in_squares<false>(p + r * width + c * PANEL, width, values + d, ids + c, n, dim, out + r * dim + d);
        }
}

}  // namespace
