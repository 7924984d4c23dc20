// The parts of attention of many tokens per row: what is asked, how it is cut into work, and products of tiles.
//
// A block of query rows reads the keys a piece at a time, STEP_ROWS rows at once, whose logits to the piece stay in the
// nearest cache. There they become weights relative to about each row's largest logit so far, and weigh the values; a
// much larger logit scales down what has been summed. Pieces are the same for all blocks, so a row does not depend on the
// rows beside it. Sums over the rows need the weights of all keys again when the largest logits are known, so a block
// that is counted keeps them, piece by piece: fewer rows, or they would leave the second-level cache. Keys are transposed
// once per head, a panel of PANEL keys at a time. Panels that no row of a block sees are skipped, so a causal chunk costs
// half.
//
// One head's rows are cut into parts whose number does not depend on the number of threads. One thread does a part from
// beginning to end, and the sums of the parts are added in order, so results do not depend on the threads.

#pragma once

#include <algorithm>

#include "heads.h"
#include "vectors.h"

// Keys and values that lie together. Strides count elements; the last axis is dense.
extern "C" struct Piece {
    int64_t slots;
    const char *keys;
    int64_t key_row, key_head, key_slot;
    const char *values;
    int64_t value_row, value_head, value_slot;
    const int32_t *positions;
    int64_t position_row, position_head;
};

extern "C" struct Prefill {
    int64_t rows, kv_heads, group, tokens, dim, value_dim, threads, type;  // as in Attend
    const char *query;
    int64_t query_row, query_head, query_token;
    Piece pieces[2];
    const int64_t *now;  // positions of the queries, -1 for padding; (rows, tokens), dense
    char *out;           // (rows, query heads, tokens, value_dim), dense
    const float *sinks;  // per query head, or null
    int64_t window;      // 0 for none
    int64_t masses, lows;
    const float *weights;  // (masses + lows, rows, tokens), dense: of each token's row in each sum
    float *sums;           // (masses + lows, rows, kv_heads, slots of both pieces), dense
    const float *gains;    // per row, on the logits of `masses`; null for none, as there are if there are `lows`
    int64_t live;
    const char *again;  // queries that read all keys once more, (rows, query heads, tokens, dim), dense; null for none
    float *shares;      // largest share of each key in that reading, (rows, kv_heads, slots of both pieces), dense
    double scaling, softcap, theta;
};

namespace {

constexpr int ROWS = 6;  // with TILE vectors of keys, the sums fill the registers
constexpr int64_t SQUARE = 16;  // rows and columns of squares.h
constexpr int64_t SPLITS = 3;   // narrow numbers whose sum is a wider one, the largest first
constexpr int64_t PANEL = TILE * W;
constexpr int64_t PARTS = 16, HEADS_AT_ONCE = 32;
constexpr int64_t MOST_ROWS = 192, KEPT_ROWS = 48, STEP_ROWS = 32;  // of a block, of one that is counted, at once
constexpr float SLACK = 8.0f;  // see `Block::slack`
constexpr int ADDED = 4;       // panels that are summed at once
constexpr int64_t PIECE = 256 / PANEL, NEAR_WIDTH = PIECE * PANEL + W;  // panels of a piece; from row to row of logits

enum Product { IN_FLOATS, IN_PAIRS, IN_SQUARES };  // of queries and keys: of floats, or of narrow numbers

// One head's keys and values, packed: panels of transposed keys, values in pairs, positions.
struct Packed {
    float *keys, *values;
    int32_t *pairs;  // keys in pairs of narrow numbers; see narrow.h
    int32_t *positions, *least, *most;  // per panel: the smallest of its positions, empty slots aside, and the largest
    int32_t *gaps;                      // per panel: whether it has empty slots
};

// How a call is cut into work.
struct Plan {
    const Prefill &a;
    Pairs dim, value_dim;
    const Product first, second;  // how the first and the second reading multiply
    const bool squares, split;    // `split`: the narrow numbers of the second reading are parts of wider ones
    const int64_t unit;           // the rows of a block are a multiple of it, as products of both readings need
    int64_t slots, panels, tokens_each, kept_tokens, rows_each, blocks, parts, heads_each, pairs, keys, values, packed;
    int64_t partial, pieces, step, kept_rows, kept, scratch, query;

    Plan(const Prefill &a, Product first, Product second)
        : a(a), dim(a.dim), value_dim(a.value_dim), first(first), second(second), squares(first == IN_SQUARES),
          split(a.again && second == IN_SQUARES && !squares), unit(squares ? SQUARE : split ? SQUARE * ROWS / 2 : ROWS) {
        slots = a.pieces[0].slots + a.pieces[1].slots;
        panels = (slots + PANEL - 1) / PANEL;
        kept_tokens = std::clamp<int64_t>(KEPT_ROWS / a.group, 1, a.tokens);
        tokens_each = std::clamp(a.tokens / PARTS, kept_tokens, std::max(kept_tokens, MOST_ROWS / a.group));
        tokens_each = tokens_each / kept_tokens * kept_tokens;
        rows_each = up(tokens_each * a.group, unit);
        kept_rows = a.masses || a.lows || keeps_again() ? up(kept_tokens * a.group, unit) : 0;
        blocks = (a.tokens + tokens_each - 1) / tokens_each;
        parts = std::min(blocks, PARTS);
        heads_each = std::min((HEADS_AT_ONCE + parts - 1) / parts, a.rows * a.kv_heads);
        pairs = squares || (a.again && second != IN_FLOATS) ? dim.floats() / 2 * (split ? SPLITS : 1) : 0;
        keys = squares ? 0 : panels * PANEL * dim.floats();
        values = panels * PANEL * value_dim.floats() / (squares ? 2 : 1);
        packed = up(keys + values + panels * (PANEL * (pairs + 1) + 3), W);
        partial = (a.masses + a.lows + (a.again ? 1 : 0)) * panels * PANEL;
        pieces = up((panels + PIECE - 1) / PIECE, W);
        kept = kept_rows * (panels + PIECE - 1) / PIECE * NEAR_WIDTH;
        step = std::min(up(STEP_ROWS, squares ? SQUARE : ROWS), rows_each);
        query = std::max(dim.floats(), pairs);
        scratch = kept + step * NEAR_WIDTH + kept_rows * (pieces + 1) + panels +
                  rows_each * (query + value_dim.floats() + 6 + 2 * W) +
                  tokens_each * (a.masses + a.lows + 1);
    }

    // Whether the second reading keeps its logits. Products in squares are done again, which is faster than logits beyond
    // the nearest cache.
    bool keeps_again() const { return a.again && second != IN_SQUARES; }

    Packed head(float *memory) const {
        int32_t *in_pairs = (int32_t *)(memory + keys + values);
        int32_t *positions = in_pairs + panels * PANEL * pairs;
        int32_t *least = positions + panels * PANEL;
        return {memory, memory + keys, in_pairs, positions, least, least + panels, least + 2 * panels};
    }
};

// The pair p of a vector, padded with zeros; all zeros for a null pointer.
template <class X>
inline Pair pair_of(const typename X::T *from, Pairs pairs, int64_t p) {
    const int64_t rest = pairs.dim - p * 2 * W;
    if (!from) return {Floats{}, Floats{}};
    return rest >= 2 * W ? X::widen(from + p * 2 * W) : widen<X>(from + p * 2 * W, rest);
}

// Dot products of ROWS queries with a panel of keys.
inline void dots(const float *query, int64_t dim, const float *keys, float *to, int64_t width) {
    Floats acc[ROWS][TILE] = {};
    for (int64_t d = 0; d < dim; d++) {
        Floats k[TILE];
        for (int i = 0; i < TILE; i++) k[i] = load<Floats>(keys + d * PANEL + i * W);
        for (int r = 0; r < ROWS; r++) {
            const Floats q = in_register(all(query[r * dim + d]));
            for (int i = 0; i < TILE; i++) acc[r][i] += q * k[i];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < TILE; i++) store(to + r * width + i * W, acc[r][i]);
}

// Add n values, weighted by the probabilities of ROWS queries, to N vectors of the outputs.
template <int N>
inline void mix(const float *p, int64_t width, int64_t n, const float *values, int64_t dim, float *out) {
    Floats acc[ROWS][N];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < N; i++) acc[r][i] = load<Floats>(out + r * dim + i * W);
    for (int64_t j = 0; j < n; j++) {
        Floats v[N];
        for (int i = 0; i < N; i++) v[i] = load<Floats>(values + j * dim + i * W);
        for (int r = 0; r < ROWS; r++) {
            const Floats weight = in_register(all(p[r * width + j]));
            for (int i = 0; i < N; i++) acc[r][i] += weight * v[i];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < N; i++) store(out + r * dim + i * W, acc[r][i]);
}

// Add the values of all panels, weighted by the probabilities of the rows, to the outputs, whose columns are in the
// order of `Pair`.
inline void mix_panels(const float *p, int64_t width, int64_t rows, const float *packed, const int32_t *ids,
                       int64_t panels, int64_t dim, float *out) {
    for (int64_t c = 0, n; c < panels; c += n) {
        n = c + 1 < panels && ids[c + 1] == ids[c] + 1 ? 2 : 1;
        const float *values = packed + ids[c] * PANEL * dim;
        for (int64_t r = 0; r < rows; r += ROWS) {
            const float *weights = p + r * width + c * PANEL;
            int64_t d = 0;
            for (; d + TILE * W <= dim; d += TILE * W)
                mix<TILE>(weights, width, n * PANEL, values + d, dim, out + r * dim + d);
            for (; d < dim; d += 2 * W) mix<2>(weights, width, n * PANEL, values + d, dim, out + r * dim + d);
        }
    }
}

}  // namespace
