// What a block of a prompt's query rows reports: sums over the rows.

#pragma once

#include "block.h"

namespace {

class Reading : Block {
    float *const weights, *const shares, *const times;

   public:
    Reading(const Plan &plan, Packed held, int64_t i, int64_t first, int64_t tokens, float *scratch)
        : Block(plan, held, i, first, tokens, scratch), weights((float *)(ids + plan.panels)),
          shares(weights + plan.tokens_each * (a.masses + a.lows)), times(shares + plan.tokens_each) {}

    // Write the outputs, and add to the sums, which are `stride` floats apart.
    template <class X>
    void run(float *sums, int64_t stride) {
        find_panels();
        take_queries<X>(a.query, a.query_row, a.query_head, a.query_token, plan.squares);
        const bool counts = load_weights();
        attend(counts);
        write_outputs<X>();
        if (!counts) return;
        for (int64_t r = 0; r < real_rows(); r++) find_factors(r);
        if (a.lows) return count_all(sums, stride);
        for (int64_t f = 0; f < a.masses; f++) add_all(f, sums + f * stride);
    }

   private:
    // Copy the weights of the block's tokens; false if all are 0. A mean over the group is part of them.
    bool load_weights() {
        bool some = false;
        for (int64_t f = 0; f < a.masses + a.lows; f++)
            for (int64_t t = 0; t < tokens; t++) {
                const float weight = a.weights[(f * a.rows + row) * a.tokens + first + t];
                weights[f * tokens + t] = weight;
                some |= weight != 0.0f;
            }
        return some;
    }

    // What the kept weights of a row still have to be multiplied with to become probabilities, for each piece.
    void find_factors(int64_t r) {
        const bool tempers = a.gains && !a.lows;
        const float gain = tempers ? a.gains[row] : 1.0f, last = base(r), times = tempers ? temper[r] : scale[r];
        for (int64_t i = 0; i < plan.pieces; i += W) {
            float *const factor = then + r * plan.pieces + i;
            const Floats before = load<Floats>(factor), less = (before - last) * gain;
            store(factor, select(before > -INFINITY, exp_of_small(less), Floats{}) * times);
        }
    }

    float factor(int64_t r, int64_t c) const { return then[r * plan.pieces + ids[c] / PIECE]; }

    // One over the share of a token's attention that a key gets if all keys get the same.
    float share(int64_t t) const {
        if (!a.live) return (float)at[t * a.group] + 1.0f;
        Ints seen = {};
        for (int64_t c = 0; c < active; c++)
            for (int64_t i = 0; i < PANEL; i += W) {
                const Ints k = load<Ints>(held.positions + ids[c] * PANEL + i);
                seen -= (k >= 0) & (k <= at[t * a.group]);
            }
        return (float)sum(seen);
    }

    // Add the probabilities of all keys to a sum, row by row.
    void add_all(int64_t f, float *sums) {
        for (int64_t c = 0; c < active; c++) {
            if (c == 0 || ids[c] / PIECE != ids[c - 1] / PIECE)
                for (int64_t r = 0; r < real_rows(); r++)
                    times[r] = weights[f * tokens + r / a.group] / (float)a.group * factor(r, c);
            add((a.gains ? tempered : kept) + c * PANEL, sums + ids[c] * PANEL);
        }
    }

    // Add a panel's weights times those of the rows.
    void add(const float *from, float *to) const {
        constexpr int64_t AHEAD = 4;
        Floats total[TILE];
        for (int i = 0; i < TILE; i++) total[i] = load<Floats>(to + i * W);
        for (int64_t r = 0; r < real_rows(); r++, from += width) {
            for (int i = 0; i < TILE; i++) __builtin_prefetch(from + AHEAD * width + i * W);
            if (times[r] == 0.0f) continue;
            for (int i = 0; i < TILE; i++) total[i] += load<Floats>(from + i * W) * times[r];
        }
        for (int i = 0; i < TILE; i++) store(to + i * W, total[i]);
    }

    void count_all(float *sums, int64_t stride) {
        for (int64_t t = 0; t < tokens; t++) shares[t] = share(t);
        for (int64_t c = 0; c < active; c++)
            for (int64_t i = 0; i < TILE; i++) count(c, i, sums + ids[c] * PANEL + i * W, stride);
    }

    // Add W keys' probabilities, and the weights of the rows that find them low.
    void count(int64_t c, int64_t i, float *sums, int64_t stride) {
        const float *from = kept + c * PANEL + i * W;
        const Ints k = load<Ints>(held.positions + ids[c] * PANEL + i * W);
        for (int64_t t = 0; t < tokens; t++) {
            Floats mean = {};
            for (int64_t r = t * a.group; r < (t + 1) * a.group; r++) mean += load<Floats>(from + r * width) * factor(r, c);
            mean /= (float)a.group;
            const Ints low = (mean * shares[t] * (float)a.theta < 1.0f) & (k >= 0) & (k <= at[t * a.group]);
            for (int64_t f = 0; f < a.masses + a.lows; f++) {
                const float weight = weights[f * tokens + t];
                if (weight == 0.0f) continue;
                const Floats more = f < a.masses ? mean * weight : select(low, all(weight), Floats{});
                store(sums + f * stride, load<Floats>(sums + f * stride) + more);
            }
        }
    }
};

}  // namespace
