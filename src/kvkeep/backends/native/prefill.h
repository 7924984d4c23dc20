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
        in_halves() ? report<true>(sums, stride) : report<false>(sums, stride);
    }

   private:
    // Call work(c, kept) for each panel and what is kept of it in the first row.
    template <class Work>
    void each_panel(const Work &work) const {
        for (int64_t c = 0, n; c < active; c += n) {
            n = of_piece(c);
            for (int64_t i = 0; i < n; i++) work(c + i, kept_of(c, 0) + i * PANEL);
        }
    }

    // Copy the weights of the block's tokens; false if all are 0.
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
        const float gain = a.gains ? a.gains[row] : 1.0f, last = base(r), times = a.gains ? temper[r] : scale[r];
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

    bool in_halves() const { return plan.squares && !a.gains; }

    // Two vectors of kept weights.
    template <bool HALVES>
    static Pair weights_at(const float *from) {
        if constexpr (HALVES) return from_halves(from);
        return {load<Floats>(from), load<Floats>(from + W)};
    }

    template <bool HALVES>
    void report(float *sums, int64_t stride) {
        if (a.lows) return count_all<HALVES>(sums, stride);
        for (int64_t f = 0; f < a.masses; f++) add_all<HALVES>(f, sums + f * stride);
    }

    // Add the probabilities of all keys to a sum, row by row.
    template <bool HALVES>
    void add_all(int64_t f, float *sums) {
        for (int64_t c = 0, n, i; c < active; c += n) {
            n = of_piece(c);
            for (int64_t r = 0; r < real_rows(); r++)
                times[r] = weights[f * tokens + r / a.group] / (float)a.group * factor(r, c);
            for (i = 0; i + ADDED <= n; i += ADDED) add<HALVES, ADDED>(c, i, sums);
            for (; i < n; i++) add<HALVES, 1>(c, i, sums);
        }
    }

    // Add the weights of N panels, from number i of a piece on, times those of the rows.
    template <bool HALVES, int N>
    void add(int64_t c, int64_t i, float *sums) const {
        const float *from = kept_of(c, 0) + i * PANEL;
        Floats total[N][TILE];
        for (int p = 0; p < N; p++)
            for (int j = 0; j < TILE; j++) total[p][j] = load<Floats>(sums + ids[c + i + p] * PANEL + j * W);
        for (int64_t r = 0; r < real_rows(); r++, from += NEAR_WIDTH) {
            if (times[r] == 0.0f) continue;
            for (int p = 0; p < N; p++)
                for (int j = 0; j < TILE; j += 2) {
                    const Pair found = weights_at<HALVES>(from + p * PANEL + j * W);
                    total[p][j] += found.a * times[r];
                    total[p][j + 1] += found.b * times[r];
                }
        }
        for (int p = 0; p < N; p++)
            for (int j = 0; j < TILE; j++) store(sums + ids[c + i + p] * PANEL + j * W, total[p][j]);
    }

    template <bool HALVES>
    void count_all(float *sums, int64_t stride) {
        for (int64_t t = 0; t < tokens; t++) shares[t] = share(t);
        each_panel([&](int64_t c, const float *x) {
            for (int64_t i = 0; i < PANEL; i += 2 * W) count<HALVES>(c, i, x + i, sums + ids[c] * PANEL + i, stride);
        });
    }

    // Add the probabilities of 2 W keys, and the weights of the rows that find them low.
    template <bool HALVES>
    void count(int64_t c, int64_t i, const float *from, float *sums, int64_t stride) {
        for (int64_t t = 0; t < tokens; t++) {
            Pair mean = {};
            for (int64_t r = t * a.group; r < (t + 1) * a.group; r++) {
                const Pair found = weights_at<HALVES>(from + r * NEAR_WIDTH);
                mean.a += found.a * factor(r, c);
                mean.b += found.b * factor(r, c);
            }
            count_one(c, i, t, mean.a / (float)a.group, sums, stride);
            count_one(c, i + W, t, mean.b / (float)a.group, sums + W, stride);
        }
    }

    // The same for W keys and one token.
    void count_one(int64_t c, int64_t i, int64_t t, Floats mean, float *sums, int64_t stride) const {
        const Ints k = load<Ints>(held.positions + ids[c] * PANEL + i);
        const Ints low = (mean * shares[t] * (float)a.theta < 1.0f) & (k >= 0) & (k <= at[t * a.group]);
        for (int64_t f = 0; f < a.masses + a.lows; f++) {
            const float weight = weights[f * tokens + t];
            if (weight == 0.0f) continue;
            const Floats more = f < a.masses ? mean * weight : select(low, all(weight), Floats{});
            store(sums + f * stride, load<Floats>(sums + f * stride) + more);
        }
    }
};

}  // namespace
