// Attention of a prompt's tokens: the work of all heads on torch's threads, and the sums of their parts.

#pragma once

#include "again.h"
#include "prefill.h"

namespace {

// Pack one panel of a head. Empty slots become zeros.
template <class X>
void pack(const Plan &plan, int64_t row, int64_t head, int64_t panel, Packed to, float *scratch) {
    typedef typename X::T T;
    const Pairs dim = plan.dim, value_dim = plan.value_dim;
    float *keys = to.keys + panel * PANEL * dim.floats(), *values = to.values + panel * PANEL * value_dim.floats();
    const T *found[PANEL], *found_values[PANEL];
    int32_t *positions = to.positions + panel * PANEL, least = INT32_MAX, most = -1;
    for (int64_t j = 0; j < PANEL; j++) {
        const int64_t held = plan.a.pieces[0].slots, all = panel * PANEL + j;
        const Piece &piece = plan.a.pieces[all >= held];
        const int64_t i = all >= held ? all - held : all;
        const int32_t *known = piece.positions + row * piece.position_row + head * piece.position_head;
        const T *key = (const T *)piece.keys + row * piece.key_row + head * piece.key_head;
        const T *value = (const T *)piece.values + row * piece.value_row + head * piece.value_head;
        positions[j] = i < piece.slots ? known[i] : -1;
        const bool real = positions[j] >= 0;
        least = real ? std::min(least, positions[j]) : least;
        most = std::max(most, positions[j]);
        found[j] = real ? key + i * piece.key_slot : nullptr;
        found_values[j] = real ? value + i * piece.value_slot : nullptr;
        for (int64_t p = 0; !plan.squares && p < value_dim.n; p++) {
            const Pair v = pair_of<X>(found_values[j], value_dim, p);
            store(values + j * value_dim.floats() + p * 2 * W, v.a);
            store(values + j * value_dim.floats() + p * 2 * W + W, v.b);
        }
    }
    to.least[panel] = least;
    to.most[panel] = most;
    to.gaps[panel] = std::find(positions, positions + PANEL, -1) != positions + PANEL;
    int32_t *const pairs = to.pairs + panel * PANEL * plan.pairs;
    if (plan.split) pack_split<X>(found, dim, scratch, pairs);
    else if (plan.pairs) pack_pairs(Panel<T>(found), plan.a.dim, dim.floats(), pairs);
    if (plan.squares) {
        int32_t *rows = (int32_t *)to.values + panel * PANEL / 2 * value_dim.floats();
        return pack_rows_in_pairs(Panel<T>(found_values), plan.a.value_dim, value_dim.floats(), rows);
    }
    float part[PANEL][2 * W];
    for (int64_t p = 0; p < dim.n; p++) {
        for (int64_t j = 0; j < PANEL; j++) {
            const Pair k = pair_of<X>(found[j], dim, p);
            store(part[j], k.a);
            store(part[j] + W, k.b);
        }
        for (int64_t d = 0; d < 2 * W; d++)
            for (int64_t j = 0; j < PANEL; j++) keys[(p * 2 * W + d) * PANEL + j] = part[j][d];
    }
}

// Whether the row of some token in [first, end) is added to a sum.
inline bool counts(const Prefill &a, int64_t row, int64_t first, int64_t end) {
    for (int64_t f = 0; f < a.masses + a.lows; f++) {
        const float *const weights = a.weights + (f * a.rows + row) * a.tokens;
        if (std::any_of(weights + first, weights + end, [](float weight) { return weight != 0.0f; })) return true;
    }
    return false;
}

// Read a block, in smaller ones if something of it is kept.
template <class X>
void read_block(const Plan &plan, Packed held, int64_t i, int64_t block, float *sums, float *scratch) {
    const Prefill &a = plan.a;
    const int64_t begin = block * plan.tokens_each, end = std::min(begin + plan.tokens_each, a.tokens);
    const bool keeps = plan.keeps_again() || counts(a, i / a.kv_heads, begin, end);
    const int64_t each = keeps ? plan.kept_tokens : plan.tokens_each, padded = plan.panels * PANEL;
    for (int64_t first = begin; first < end; first += each) {
        const int64_t n = std::min(each, end - first);
        Reading(plan, held, i, first, n, scratch).run<X>(sums, padded);
        if (a.again) Again(plan, held, i, first, n, scratch).run<X>(sums + (a.masses + a.lows) * padded);
    }
}

template <class X>
int64_t prefill_as(const Prefill &a) {
    const bool scales = (float)a.scaling > 0;  // narrow products are masked before they are scaled
    const bool pairs = scales && in_pairs<X>(), squares = scales && has_squares();
    const Plan plan(a, pairs && squares ? IN_SQUARES : IN_FLOATS, squares ? IN_SQUARES : pairs ? IN_PAIRS : IN_FLOATS);
    const int64_t heads = a.rows * a.kv_heads, fields = a.masses + a.lows, padded = plan.panels * PANEL;
    const Scratch memory(plan.heads_each * plan.packed), partial(plan.heads_each * plan.parts * plan.partial);
    if (!memory.get() || !partial.get()) return -1;
    for (int64_t start = 0; start < heads; start += plan.heads_each) {
        const int64_t n = std::min(plan.heads_each, heads - start), bytes = n * padded * a.tokens * 4;
        const auto held = [&](int64_t i) { return plan.head(memory.get() + i * plan.packed); };
        const int64_t room = plan.split ? 2 * PANEL * plan.dim.floats() : 0;
        bool done = for_each(n * plan.panels, bytes, a.threads, room, [&](int64_t i, float *scratch) {
            const int64_t which = start + i / plan.panels;
            pack<X>(plan, which / a.kv_heads, which % a.kv_heads, i % plan.panels, held(i / plan.panels), scratch);
        });
        done = done && for_each(n * plan.parts, bytes, a.threads, plan.scratch, [&](int64_t i, float *scratch) {
            const int64_t part = plan.parts - 1 - i / n, which = i % n;  // the last ones see most keys
            const Squares registers(plan.squares || plan.split);
            float *sums = partial.get() + (which * plan.parts + part) * plan.partial;
            std::memset(sums, 0, fields * padded * sizeof *sums);
            if (a.again) std::fill_n(sums + fields * padded, padded, -INFINITY);
            for (int64_t b = part * plan.blocks / plan.parts; b < (part + 1) * plan.blocks / plan.parts; b++)
                read_block<X>(plan, held(which), start + which, b, sums, scratch);
        });
        done = done && for_each(n * fields, bytes, a.threads, 0, [&](int64_t i, float *) {
            const int64_t which = i / fields, field = i % fields;
            float *to = a.sums + (field * heads + start + which) * plan.slots;
            const float *from = partial.get() + which * plan.parts * plan.partial + field * padded;
            for (int64_t j = 0; j < plan.slots; j++) {
                float total = 0.0f;
                for (int64_t part = 0; part < plan.parts; part++) total += from[part * plan.partial + j];
                to[j] = total;
            }
        });
        done = done && for_each(a.again ? n : 0, bytes, a.threads, 0, [&](int64_t i, float *) {
            const float *from = partial.get() + i * plan.parts * plan.partial + fields * padded;
            for (int64_t j = 0; j < plan.slots; j++) {
                float most = from[j];
                for (int64_t part = 1; part < plan.parts; part++) most = std::max(most, from[part * plan.partial + j]);
                a.shares[(start + i) * plan.slots + j] = std::exp(most);
            }
        });
        if (!done) return -1;
    }
    return 0;
}

}  // namespace
