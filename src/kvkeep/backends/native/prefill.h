// A block of a prompt's query rows: attention, sums over the rows, and a second reading of all keys.

#pragma once

#include "squares.h"

namespace {

// One block of query rows of one head. Rows are sorted by token, then by query head.
template <class X>
class Block {
    const Plan &plan;
    const Prefill &a;
    const Packed held;
    const int64_t row, head, first, tokens, rows, width;
    float *const p, *const tempered;
    float *const query, *const out, *const scale, *const temper, *const known, *const weights, *const shares;
    int32_t *const at, *const ids;
    int64_t active = 0;

   public:
    Block(const Plan &plan, Packed held, int64_t i, int64_t block, float *scratch)
        : plan(plan), a(plan.a), held(held), row(i / a.kv_heads), head(i % a.kv_heads),
          first(block * plan.tokens_each), tokens(std::min(plan.tokens_each, a.tokens - first)),
          rows(up(tokens * a.group, plan.unit)), width(plan.width), p(scratch), tempered(p + plan.rows_each * width),
          query(tempered + (a.gains ? plan.rows_each * width : 0)), out(query + plan.rows_each * plan.dim.floats()),
          scale(out + plan.rows_each * plan.value_dim.floats()), temper(scale + plan.rows_each),
          known(temper + plan.rows_each), weights(known + plan.rows_each),
          shares(weights + plan.tokens_each * (a.masses + a.lows)), at((int32_t *)(shares + plan.tokens_each)),
          ids(at + plan.tokens_each) {}

    // Write the outputs, and add to the sums, which are `stride` floats apart.
    void run(float *sums, int64_t stride) {
        find_panels();
        multiply(a.query, a.query_row, a.query_head, a.query_token, plan.squares, 1.0f);
        const bool counts = load_weights(), floats = !plan.squares || (counts && (a.lows || !a.gains));
        for (int64_t r = 0; r < tokens * a.group; r++) {
            normalise(r, floats);
            if (counts && !a.lows) add(r, sums, stride);
            if (plan.squares && floats && !a.lows) halve(r);
        }
        for (int64_t c = 0; counts && a.lows && c < active; c++)
            for (int64_t i = 0; i < TILE; i++) count(c, i, sums + ids[c] * PANEL + i * W, stride);
        for (int64_t r = 0; plan.squares && floats && a.lows && r < tokens * a.group; r++) halve(r);
        write_outputs();
    }

    // After `run`: let the queries read all keys again, and take the logs of the largest shares.
    void read_again(float *shares_of_keys) {
        active = 0;
        for (int64_t panel = 0; panel < plan.panels; panel++)
            if (held.most[panel] >= 0) ids[active++] = (int32_t)panel;
        const int64_t each = a.tokens * a.dim;
        multiply(a.again, a.kv_heads * a.group * each, each, a.dim, plan.pairs > 0, (float)a.scaling);
        for (int64_t c = 0; c < active; c++) mask_again(c);
        for (int64_t r = 0; r < tokens * a.group; r++) known[r] = total_again(r);
        for (int64_t c = 0; c < active; c++)
            for (int64_t i = 0; i < PANEL; i += W) {
                Floats most = load<Floats>(shares_of_keys + ids[c] * PANEL + i);
                for (int64_t r = 0; r < tokens * a.group; r++) {
                    const Floats share = load<Floats>(p + r * width + c * PANEL + i) - known[r];
                    most = select(share > most, share, most);
                }
                store(shares_of_keys + ids[c] * PANEL + i, most);
            }
    }

   private:
    // The newest position behind the window.
    int32_t behind(int32_t now) const { return a.window ? (int32_t)(now - a.window) : INT32_MIN; }

    // List the panels with a key that some row sees. Keys behind the window count as low, so they are seen there.
    void find_panels() {
        int32_t least = INT32_MAX, most = -1;
        for (int64_t t = 0; t < tokens; t++) {
            at[t] = (int32_t)a.now[row * a.tokens + first + t];
            most = std::max(most, at[t]);
            if (at[t] >= 0) least = std::min(least, at[t]);
        }
        const int32_t hidden = a.lows ? INT32_MIN : behind(least);
        for (int64_t panel = 0; panel < plan.panels; panel++)
            if (held.most[panel] > hidden && held.most[panel] >= 0 && held.least[panel] <= most)
                ids[active++] = (int32_t)panel;
    }

    // Call with a row and its query; null for rows that only fill a unit up. Steps count elements.
    template <class Call>
    void each_query(const char *queries, int64_t row_step, int64_t head_step, int64_t token_step, const Call &call) {
        typedef typename X::T T;
        for (int64_t r = 0; r < rows; r++) {
            const T *from = (const T *)queries + row * row_step + (head * a.group + r % a.group) * head_step +
                            (first + r / a.group) * token_step;
            call(r, r < tokens * a.group ? from : nullptr);
        }
    }

    // What the products in squares still have to be multiplied with when they become logits.
    float left() const { return plan.squares ? (float)a.scaling : 1.0f; }

    // The logits of all rows, without soft cap and mask; `pairs`: products of narrow numbers, multiplied with `by`.
    void multiply(const char *queries, int64_t row_step, int64_t head_step, int64_t token_step, bool pairs, float by) {
        const auto call = [&](int64_t r, const typename X::T *from) { pairs ? copy(r, from) : widen(r, from); };
        each_query(queries, row_step, head_step, token_step, call);
        for (int64_t c = 0; c < active; c++)
            for (int64_t r = 0; r < rows; r += plan.unit) pairs ? dots_narrow(c, r, by) : dots_wide(c, r);
    }

    void widen(int64_t r, const typename X::T *from) {
        for (int64_t i = 0; i < plan.dim.n; i++) {
            const Pair q = pair_of<X>(from, plan.dim, i);
            store(query + r * plan.dim.floats() + i * 2 * W, q.a * (float)a.scaling);
            store(query + r * plan.dim.floats() + i * 2 * W + W, q.b * (float)a.scaling);
        }
    }

    void copy(int64_t r, const typename X::T *from) {
        int32_t *const to = (int32_t *)query + r * plan.pairs;
        std::memset(to, 0, plan.pairs * sizeof *to);
        if (from) std::memcpy(to, from, a.dim * sizeof *from);
    }

    void dots_wide(int64_t c, int64_t r) {
        const int64_t dim = plan.dim.floats();
        dots(query + r * dim, dim, held.keys + ids[c] * PANEL * dim, p + r * width + c * PANEL, width);
    }

    void dots_narrow(int64_t c, int64_t r, float by) {
        const int32_t *const queries = (int32_t *)query + r * plan.pairs;
        const int32_t *const keys = held.pairs + ids[c] * PANEL * plan.pairs;
        float *const to = p + r * width + c * PANEL;
        if (plan.squares) dots_in_squares(queries, plan.pairs, keys, to, width, by);
        else dots_of_pairs(queries, plan.pairs, keys, to, width, by);
    }

    // Turn the logits of a row into probabilities times 1 / scale: floats, or halves for products in squares.
    void normalise(int64_t r, bool floats) {
        const int32_t now = at[r / a.group], hidden = behind(now);
        const float softcap = (float)a.softcap, sink = a.sinks ? a.sinks[head * a.group + r % a.group] : -INFINITY;
        const float by = softcap == 0.0f ? left() : 1.0f;  // soft caps need the logits themselves
        float *x = p + r * width, *other = tempered + r * width;
        Floats top = all(-INFINITY);
        Ints shown = {};
        int64_t seen = 0;
        for (int64_t c = 0; c < active; c++) {
            const bool whole = !held.gaps[ids[c]] && held.most[ids[c]] <= now && held.least[ids[c]] > hidden;
            for (int64_t i = c * PANEL; i < (c + 1) * PANEL; i += W) {
                Floats logits = load<Floats>(x + i);
                if (softcap != 0.0f) logits = tanh(logits * left() / softcap) * softcap;
                if (!whole) {
                    const Ints k = load<Ints>(held.positions + ids[c] * PANEL + i - c * PANEL);
                    const Ints known = (k >= 0) & (k <= now), show = known & (k > hidden);
                    seen -= sum(known);
                    shown |= show;
                    logits = select(show, logits, all(-INFINITY));
                }
                if (!whole || softcap != 0.0f) store(x + i, logits);
                top = select(logits > top, logits, top);
            }
            if (whole) seen += PANEL, shown |= -1;
        }
        if (r % a.group == 0) shares[r / a.group] = a.live ? (float)seen : (float)now + 1.0f;
        const float most = std::max(largest(top) * by, sink);
        if (most == -INFINITY && !any(shown)) {  // otherwise the logits are NaN or -inf, and so is the result
            scale[r] = temper[r] = 0.0f;
            known[r] = -INFINITY;
            std::memset(x, 0, active * PANEL * sizeof *x);
            if (a.gains) std::memset(other, 0, active * PANEL * sizeof *x);
            return;
        }
        const float gain = a.gains ? a.gains[row] : 1.0f;
        Floats total = {}, tempered_total = {};
        const auto weight = [&](int64_t i) {
            const Floats scaled = in_register(load<Floats>(x + i) * by);  // rounded as `most`, so none is above it
            const Floats logits = scaled - most, e = exp_of_small(logits);
            total += e;
            if (a.gains) {
                const Floats t = select(logits > -INFINITY, exp_of_small(logits * gain), Floats{});
                store(other + i, t);
                tempered_total += t;
            }
            return e;
        };
        for (int64_t i = 0; i < active * PANEL; i += 2 * W) {
            const Floats one = weight(i), two = weight(i + W);
            if (floats) store(x + i, one), store(x + i + W, two);
            else put_halves(one, two, x + i);
        }
        const float all_of_it = sum(total) + (a.sinks ? std::exp(sink - most) : 0.0f);
        scale[r] = 1.0f / all_of_it;
        known[r] = most + std::log(all_of_it);
        temper[r] = a.gains ? 1.0f / std::max(sum(tempered_total), 1e-37f) : scale[r];
    }

    // Turn the floats of a row into halves.
    void halve(int64_t r) {
        float *const x = p + r * width;
        for (float *i = x; i < x + active * PANEL; i += 2 * W) put_halves(load<Floats>(i), load<Floats>(i + W), i);
    }

    // Soft cap, and minus infinity for empty slots, in the logits of the second reading.
    void mask_again(int64_t c) {
        const float softcap = (float)a.softcap;
        if (softcap == 0.0f && !held.gaps[ids[c]]) return;
        for (int64_t i = 0; i < PANEL; i += W) {
            const Ints there = load<Ints>(held.positions + ids[c] * PANEL + i) >= 0;
            for (int64_t r = 0; r < tokens * a.group; r++) {
                float *const x = p + r * width + c * PANEL + i;
                Floats logits = load<Floats>(x);
                if (softcap != 0.0f) logits = tanh(logits / softcap) * softcap;
                store(x, select(there, logits, all(-INFINITY)));
            }
        }
    }

    // The log of the sum of a row's exponentials over all keys and over those of the first reading. A row that does not
    // count gets infinity.
    float total_again(int64_t r) const {
        if (at[r / a.group] < 1) return INFINITY;
        const float *x = p + r * width;
        Floats top = all(known[r]), total = {}, again = {};
        for (int64_t i = 0; i < active * PANEL; i += W) total += exp(load<Floats>(x + i) - known[r]);
        const float all_of_it = 1.0f + sum(total);
        if (all_of_it < INFINITY) return known[r] + std::log(all_of_it);
        for (int64_t i = 0; i < active * PANEL; i += W) {  // a logit is far above the first reading, or is no number
            const Floats logits = load<Floats>(x + i);
            top = select(logits > top, logits, top);
        }
        const float most = largest(top);
        for (int64_t i = 0; i < active * PANEL; i += W) again += exp(load<Floats>(x + i) - most);
        return most + std::log(sum(again) + std::exp(known[r] - most));
    }

    void write_outputs() {
        const int64_t dim = plan.value_dim.floats();
        std::memset(out, 0, rows * dim * sizeof *out);
        if (plan.squares) mix_panels_in_squares(p, width, rows, held.values, ids, active, dim, out);
        else mix_panels(p, width, rows, held.values, ids, active, dim, out);
        for (int64_t r = 0; r < tokens * a.group; r++) {
            const int64_t query_head = (row * a.kv_heads + head) * a.group + r % a.group;
            auto *to = (typename X::T *)a.out + (query_head * a.tokens + first + r / a.group) * a.value_dim;
            if (plan.squares) put_all_narrow(out + r * dim, scale[r], (uint16_t *)to, a.value_dim);
            else write(r, to);
        }
    }

    void write(int64_t r, typename X::T *to) const {
        for (int64_t d = 0; d < a.value_dim; d += 2 * W) {
            const float *from = out + r * plan.value_dim.floats() + d;
            const Pair mixed = {load<Floats>(from) * scale[r], load<Floats>(from + W) * scale[r]};
            if (d + 2 * W <= a.value_dim) X::narrow(mixed, to + d);
            else ::narrow<X>(mixed, to + d, a.value_dim - d);
        }
    }

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

    // Add a row's probabilities to the sums.
    void add(int64_t r, float *sums, int64_t stride) {
        const float *from = (a.gains ? tempered : p) + r * width;
        for (int64_t f = 0; f < a.masses; f++) {
            const float weight = weights[f * tokens + r / a.group] / (float)a.group * temper[r];
            if (weight == 0.0f) continue;
            for (int64_t c = 0; c < active; c++)
                for (int64_t i = 0; i < PANEL; i += W) {
                    float *const to = sums + f * stride + ids[c] * PANEL + i;
                    store(to, load<Floats>(to) + load<Floats>(from + c * PANEL + i) * weight);
                }
        }
    }

    // Add W keys' probabilities, and the weights of the rows that find them low.
    void count(int64_t c, int64_t i, float *sums, int64_t stride) {
        const float *from = p + c * PANEL + i * W;
        const Ints k = load<Ints>(held.positions + ids[c] * PANEL + i * W);
        for (int64_t t = 0; t < tokens; t++) {
            Floats mean = {};
            for (int64_t r = t * a.group; r < (t + 1) * a.group; r++) mean += load<Floats>(from + r * width) * scale[r];
            mean /= (float)a.group;
            const Ints low = (mean * shares[t] * (float)a.theta < 1.0f) & (k >= 0) & (k <= at[t]);
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
